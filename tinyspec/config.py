"""EngineConfig: the settings of an engine; frozen, validated once.

``resolve`` fills in defaults that depend on the device; none is chosen by timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinyspec.errors import refuse
from tinyspec.scalars import Settings, allowed, integers, is_int, numbers, one_of, setting, switch

VERIFY = ("auto", "direct", "padded", "always")
LINEAR = ("auto", "always", "never")
PREPACK = ("auto", "never")
BACKENDS = ("auto", "triton", "torch")
KV_DTYPES = ("auto", "fp8_e4m3")
MAX_PAGE_SIZE = 1024
# A recurrent layer's states are kept at multiples of so many tokens, from position 0 on; the twins
# sum as many at once.
STATE_TILE = 8
# Most inputs before its own that such a layer's convolution may read.
MOST_TAPS = 8
# Types of devices that have graphs.
WITH_GRAPHS = ("cuda",)

_TRACED = allowed(
    "True, False or an integer of at least 1",
    lambda x: isinstance(x, bool) or (isinstance(x, int) and x > 0),
)
_PAGE = allowed(
    f"a power of two up to {MAX_PAGE_SIZE}",
    lambda x: is_int(x) and 0 < x <= MAX_PAGE_SIZE and not x & (x - 1),
)
# Drafters that have a name.
NAMED = ("ngram", "mtp")
_DRAFTER = allowed(
    'None, "ngram", "mtp", a model, ("ngram", model or "mtp") or a Drafter',
    lambda x: not isinstance(x, str) or x in NAMED,
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """Settings of an engine. None: the default of the device kind, or what the model allows.

    reference_rows: row count of the reference bucket (CPU 32, GPU 128).
    max_rows: most rows of one pass (2048); on a CPU canonical passes have 1024 at most, or
        reference_rows or max_sequences. max_sequences: most sequences running; never more than
        max_rows.
    max_model_len: longest prompt plus output (the model's positions).
    page_size: tokens per page, a power of two (CPU 128, GPU 64).
    num_pages | memory_fraction: size of the page pool, or the share of free memory it may take.
    draft_window: most drafts that wait before a verify (None: up to 16, as many as cost least).
    verify: how canonical tokens are computed. "auto" takes the cheapest way at every step; "direct"
        and "padded" run every deterministic token in a canonical bucket, which for "direct" must be
        the smallest that holds the rows; "always" drafts, and verifies in the reference bucket.
    drafter: None (the fast path), "ngram", "mtp" (the head of the model's checkpoint), an assistant
        model, one of these two behind "ngram" (a tuple), or a Drafter.
    backend: "triton", "torch" (the twins), or "auto": by device.
    trace: keep what every row of the latest passes was for, and what became of it, for
        ``engine.trace``: of 10,000 passes (True), or of so many. Changes no bit.
    verify_weights: digest the weights before every call, not only after a write that torch counts.
    prefix_cache: reuse the KV pages of earlier requests whose prompts begin with the same tokens.
    seed: of the generator that gives sampled requests without a seed theirs (None: from the OS).
    linear: which linears the ``linear`` kernel serves, whose rows do not depend on the row count:
        "auto" those that would make the reference bucket unsound, "always" all (every bucket is
        canonical then), "never" none.
    prepack: "auto": on a CPU weights that are used often are copied in oneDNN's own layout while
        requests run, as far as a quarter of the free memory holds them; "never". Changes no bit of
        a deterministic request.
    overlap: draw up and launch the next pass while the device runs one, where it does not depend on
        its results; changes no bit of a deterministic request (None: on a GPU, not on a CPU).
    cuda_graphs: capture passes that come again as graphs, one for each shape; only where the device
        has them (None: there). Models whose forward cannot be captured run eagerly all the same.
    thinking_window: most chunks of a prompt that run at once before the thoughts between them are
        known, as if these were trivial; fewer do where most of that is in vain. 1: one by one,
        None: always all that a pass holds.
    kv_dtype: of keys and values in the cache. "auto": the model's; "fp8_e4m3": a byte each,
        rounded to nearest with a constant scale of 1, saturating at 448: a cache of as much memory
        holds twice the tokens (in fp32 four times), and results are other ones than with "auto".

    Numbers may be numpy's, or tensors without dimensions. Raises ValueError naming the field, its
    value and what is allowed.
    """

    reference_rows: int | None = setting(None, integers(4))
    max_rows: int | None = setting(None, integers(4))
    max_sequences: int = setting(256, integers(1))
    max_model_len: int | None = setting(None, integers(2))
    page_size: int | None = setting(None, _PAGE)
    num_pages: int | None = setting(None, integers(1))
    memory_fraction: float | None = setting(
        None, numbers("a number in (0, 1]", lambda x: 0 < x <= 1)
    )
    draft_window: int | None = setting(None, integers(1))
    verify: str = setting("auto", one_of(VERIFY))
    drafter: Any = setting(None, _DRAFTER)
    backend: str = setting("auto", one_of(BACKENDS))
    trace: bool | int = setting(False, _TRACED)
    verify_weights: bool = setting(False, switch())
    seed: int | None = setting(None, integers(0, ", or None"))
    kv_dtype: str = setting("auto", one_of(KV_DTYPES))
    prefix_cache: bool = setting(True, switch())
    cuda_graphs: bool | None = setting(None, switch(", or None"))
    linear: str = setting("auto", one_of(LINEAR))
    prepack: str = setting("auto", one_of(PREPACK))
    overlap: bool | None = setting(None, switch(", or None"))
    thinking_window: int | None = setting(8, integers(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_fraction is not None and self.num_pages is not None:
            raise refuse("memory_fraction", self.memory_fraction, "None with num_pages")

    @property
    def drafts_by_head(self) -> bool:
        """Whether the head of the model's checkpoint drafts."""
        return self.drafter in ("mtp", ("ngram", "mtp"))

    def backend_on(self, device_type: str) -> str:
        """The kernels that run on such a device."""
        auto = "torch" if device_type == "cpu" else "triton"
        return auto if self.backend == "auto" else self.backend

    def resolve(self, *, device_type: str, model_positions: int) -> EngineConfig:
        """A copy with all defaults filled in.

        Raises ValueError where a setting does not fit the model or another setting.
        """
        cpu = device_type == "cpu"
        reference = self.reference_rows or (32 if cpu else 128)
        rows = self.max_rows or max(2048, reference)
        if rows < reference:
            raise refuse("max_rows", rows, f"at least reference_rows={reference}")
        length = self.max_model_len or model_positions
        if length > model_positions:
            raise refuse("max_model_len", length, f"at most the model's {model_positions}")
        backend = self.backend_on(device_type)
        graphs = device_type in WITH_GRAPHS and backend == "triton"
        if self.cuda_graphs and not graphs:
            raise refuse("cuda_graphs", True, f"None or False with {backend} on {device_type}")
        return replace(
            self,
            reference_rows=reference,
            max_rows=rows,
            max_sequences=min(self.max_sequences, rows),
            max_model_len=length,
            page_size=self.page_size or (128 if cpu else 64),
            backend=backend,
            overlap=not cpu if self.overlap is None else self.overlap,
            cuda_graphs=graphs if self.cuda_graphs is None else self.cuda_graphs,
        )
