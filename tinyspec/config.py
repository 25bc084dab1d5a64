"""EngineConfig: the settings of an engine; frozen, validated once.

``resolve`` fills in defaults that depend on the device; none is chosen by timing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from tinyspec.errors import refuse, refuse_other_names
from tinyspec.scalars import plain

VERIFY = ("auto", "direct", "padded", "always")
LINEAR = ("auto", "always", "never")
BACKENDS = ("auto", "triton", "torch")
KV_DTYPES = ("auto", "fp8_e4m3")
MAX_PAGE_SIZE = 1024
# Types of devices that have graphs.
WITH_GRAPHS = ("cuda",)


# The least that an integer field may be, and the values of fields that have a few.
LEAST = {
    **{"reference_rows": 4, "max_rows": 4, "max_sequences": 1, "max_model_len": 2},
    **{"page_size": 1, "num_pages": 1, "draft_window": 1, "trace": 1},
    **{"seed": 0, "thinking_window": 1},
}
ONE_OF: dict[str, tuple[object, ...]] = {
    **{"verify": VERIFY, "backend": BACKENDS, "kv_dtype": KV_DTYPES, "linear": LINEAR},
    **dict.fromkeys(("prefix_cache", "verify_weights"), (False, True)),
    **dict.fromkeys(("overlap", "cuda_graphs"), (None, False, True)),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
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
    drafter: None (the fast path), "ngram", an assistant model, or a Drafter.
    backend: "triton", "torch" (the twins), or "auto": by device.
    trace: keep what every row of the latest passes was for, and what became of it, for
        ``engine.trace``: of 10,000 passes (True), or of so many. Changes no bit.
    verify_weights: digest the weights before every call, not only after a write that torch counts.
    prefix_cache: reuse the KV pages of earlier requests whose prompts begin with the same tokens.
    seed: of the generator that gives sampled requests without a seed theirs (None: from the OS).
    linear: which linears the ``linear`` kernel serves, whose rows do not depend on the row count:
        "auto" those that would make the reference bucket unsound, "always" all (every bucket is
        canonical then), "never" none.
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

    reference_rows: int | None = None
    max_rows: int | None = None
    max_sequences: int = 256
    max_model_len: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    memory_fraction: float | None = None
    draft_window: int | None = None
    verify: str = "auto"
    drafter: Any = None
    backend: str = "auto"
    trace: bool | int = False
    verify_weights: bool = False
    seed: int | None = None
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    cuda_graphs: bool | None = None
    linear: str = "auto"
    overlap: bool | None = None
    thinking_window: int | None = 8

    def __new__(cls, **given: Any) -> EngineConfig:
        refuse_other_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "drafter" and (own := plain(value)) is not value:
                object.__setattr__(self, field.name, own)

        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is None and name not in ("max_sequences", "trace"):
                continue
            if name == "trace" and isinstance(value, bool):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise refuse(name, value, f"an integer of at least {least}")
        for name, allowed in ONE_OF.items():
            value = getattr(self, name)
            # Booleans by identity: 1 == True.
            if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
                raise refuse(name, value, f"one of {allowed}")
        if self.seed is not None and self.seed >= 2**63:
            raise refuse("seed", self.seed, "None or an integer in [0, 2**63)")
        size, share = self.page_size, self.memory_fraction
        if size is not None and (size & (size - 1) or size > MAX_PAGE_SIZE):
            raise refuse("page_size", size, f"a power of two up to {MAX_PAGE_SIZE}")
        if share is not None:
            if not (isinstance(share, (int, float)) and 0 < share <= 1):
                raise refuse("memory_fraction", share, "a number in (0, 1]")
            if self.num_pages is not None:
                raise refuse("memory_fraction", share, "None with num_pages")
        if isinstance(self.drafter, str) and self.drafter != "ngram":
            raise refuse("drafter", self.drafter, 'None, "ngram", a model or a Drafter')

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
