"""Every global setter of torch that a name gives away was looked at: "Torch's global state" in
``determinism/README.md`` says what each kind is treated as, and why."""

import importlib
import inspect
import logging
import pkgutil
import re
from fnmatch import fnmatch
from types import ModuleType

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine
from tinyspec.model import torch_settings

IN_C = re.compile(r"(?:^|_)(?:set(?=_|[A-Z])|enable(?=_|[A-Z]|$))")
IN_PYTHON = re.compile(r"_?(?:set|use|enable|disable|allow|preferred|manual)(?:_|$)")
# Their modules are not imported: for other machines, or scripts.
NOT_LOOKED_AT = ("_coreml", "_nnapi", "xeon")
# Bare names are of torch._C or of torch itself. What stands for several (*) was looked at as a
# kind.
REVIEWED = {
    "pinned": """
        _set_default_dtype _set_default_tensor_type set_default_device set_default_dtype
        set_default_tensor_type set_autocast_* set_flush_denormal _set_dispatch_mode
        _set_torch_function_state _set_grad_enabled *enable_grad *set_grad_enabled
        *fp32_precision *_set_fp32_precision_setter backends.set_flags
        _set_float32_matmul_precision set_float32_matmul_precision *.allow_tf32 _set_*_allow_tf32
        _set_*_reduced_precision_reduction cuda.allow_*_reduced_precision_reduction
        _set_cublas_allow_fp16_accumulation cuda.allow_fp16_accumulation
        _set_cublaslt_prefer_grouped_gemm cuda.prefer_cublaslt_grouped_gemm
        _set_sm_carveout_experimental _set_cudnn_benchmark cudnn.benchmark cudnn.set_flags
        _set_mkldnn_deterministic _set_mkldnn_enabled mkldnn.deterministic mkldnn.enabled
        mkldnn.set_flags _set_deterministic_* use_deterministic_algorithms
        set_deterministic_debug_mode utils.deterministic.fill_uninitialized_memory
        opt_einsum.* cuda.set_device cuda.set_stream cuda._set_stream_by_id _cuda_setDevice
        _cuda_setStream _accelerator_* accelerator.*""",
    "fingerprint": """
        set_num_threads _set_qengine quantized.engine quantized.supported_engines
        _set_blas_preferred_backend cuda.preferred_blas_library _cuda_setCublas*WorkspaceSize""",
    "refused": "cuda.tunable.* _cuda_tunableop_* _cuda_record_untuned_enable",
    "torch's own attention, convolutions, recurrent layers, linear algebra: not in passes": """
        _set_sdp_* _set_math_sdp_* _set_rocm_fa_* cuda.*_sdp cuda.preferred_rocm_fa_library
        mha.* _set_cudnn_deterministic _set_cudnn_enabled _set_cudnn_depthwise_kernel
        cudnn.deterministic cudnn.enabled cudnn.depthwise_kernel *cudnn*benchmark_limit
        _cudnn_set_conv_benchmark_empty_cache _use_*_ctc_loss _use_cudnn_rnn_flatten_weight
        _set_miopen_immediate miopen.* _set_nnpack_enabled nnpack.* xnnpack.*
        _set_linalg_* cuda.preferred_linalg_library""",
    "gradients and how they are recorded": """
        *anomaly* *multithreading_enabled _set_fwd_grad_enabled _set_autograd_fallback_mode
        _set_grad_layout_enforcement_enabled _set_view_replay_enabled
        _set_warn_on_accumulate_grad_stream_mismatch""",
    "TorchScript, tracing, functionalization, what dispatches": """
        _jit_* _debug_set_* _set_graph_exec* _tracer_* _set_tracing_state _set_value_trace
        _disable_dynamo _dispatch_* *able_functionalization _set_skip_next_torch_function
        _set_meta_in_tls_* _set_only_lift_cpu_tensors _set_generator_metaclass
        python_native.*_dsls""",
    "random numbers: passes draw none": "*rng_state* *manual_seed*",
    "memory: its address and size, not what is computed": """
        _cuda_cudaCachingAllocator_enable _cuda_setCheckpointPoolState _cuda_setMemoryFraction
        _cuda_setMemoryMetadata cuda.set_per_process_memory_fraction cuda.use_mem_pool
        cuda._use_uvm _set_cached_tensors_enabled _set_override_stale_capture_stream
        _set_default_mobile_cpu_allocator""",
    "other devices": "mtia.* _mtia_* _mps_* xpu.* cpu.set_device",
    "of one tensor, words, checks, logs, profilers, workers": """
        _set_conj _set_neg _set_tensor_metadata _set_storage_* _set_throw_on_mutable_data_ptr
        _set_check_sparse_tensor_invariants _set_dtensor_allow_implicit_replication
        _set_backcompat_* *set_warn_always _set_warnAlways _set_warn_deprecated_* _logging_*
        _set_should_use_format_with_string_table _set_print_stack_traces_on_fatal_signal
        set_printoptions *set_sync_debug_mode _enable_mobile_interface_call_export
        _set_thread_name _set_worker_* backends.disable_global_flags autograd.*_profiler*
        autograd._enable_record_function autograd._set_empty_test_observer
        set_num_interop_threads cuda.cuda cuda.matmul""",
}


def places() -> dict[str, ModuleType]:
    """Modules with public setters, by their names without "torch." and "backends."."""
    found = [module.name for module in pkgutil.iter_modules(torch.backends.__path__)]
    names = [f"backends.{name}" for name in found if name not in NOT_LOOKED_AT]
    names += ["backends", "accelerator", "autograd", "cpu", "cuda", "cuda.tunable", "mtia", "xpu"]
    names += ["utils.deterministic"]
    modules = {name: importlib.import_module(f"torch.{name}") for name in names}
    return {"": torch} | {n.removeprefix("backends."): module for n, module in modules.items()}


def setters() -> set[str]:
    """Functions of ``torch._C`` and of the public modules, properties that can be set, and what
    ``__setattr__`` of an object in such a module knows."""
    found = {name for name in dir(torch._C) if IN_C.search(name)}
    for place, module in places().items():
        held = {**vars(vars(module).get("m", module)), **vars(module)}  # of a PropModule, m's
        held = {n: v for n, v in held.items() if not isinstance(v, ModuleType)}
        names = {n for n, v in held.items() if callable(v) and IN_PYTHON.match(n)}
        names |= {n for n, v in held.items() if isinstance(v, torch.backends.ContextProp)}
        for kind in {type(module), *map(type, held.values())}:
            if not kind.__module__.startswith(("torch.backends", "torch.utils.deterministic")):
                continue
            members = inspect.getmembers_static(kind)
            names |= {n for n, v in members if hasattr(v, "__set__") and not n.startswith("__")}
            if code := getattr(vars(kind).get("__setattr__"), "__code__", None):
                names |= {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}
        found |= {f"{place}.{name}".lstrip(".") for name in names}
    return found


def unknown() -> list[str]:
    reviewed = " ".join(REVIEWED.values()).split()
    return sorted(n for n in setters() if not any(fnmatch(n, known) for known in reviewed))


def test_every_setter_of_torch_was_looked_at():
    assert not unknown(), (
        f"torch {torch.__version__} has setters that nobody has looked at: {unknown()}. Find out "
        "whether a pass computes other bits by each; pin such a one (model/torch_settings.py), put "
        "it into the fingerprint (ambient in determinism/environment.py) or refuse it "
        "(refuse_unpinnable), say so in determinism/README.md, and name it in REVIEWED"
    )


def test_control_invented_setters_are_found(monkeypatch):
    kind = type("Module", (type(torch.backends.cudnn),), {"invented": property(id, id)})
    kind.__module__ = "torch.backends.cudnn"
    monkeypatch.setattr(torch.backends.cudnn, "__class__", kind)
    for module, name in ((torch._C, "_set_invented"), (torch.cuda, "allow_invented")):
        monkeypatch.setattr(module, name, id, raising=False)
    assert unknown() == ["_set_invented", "cuda.allow_invented", "cudnn.invented"]


def test_opt_einsum_set_as_an_attribute(monkeypatch):
    """Which hides what torch's own setter sets."""
    einsum = torch.backends.opt_einsum
    monkeypatch.setitem(vars(einsum), "enabled", True)
    with torch_settings.pinned("cpu"):
        assert not einsum.enabled
    assert einsum.enabled


@pytest.mark.parametrize("newer", [True, False])
def test_a_torch_newer_than_tested_is_named_once(monkeypatch, caplog, newer):
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git1" if newer else "2.10.0")
    torch_settings._of_process.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tinyspec"):
        for _ in range(2):
            Engine(tiny()).close()
    lines = [
        line for line in caplog.messages if "2.99.0a0+git1 is newer than any tested, 2.14" in line
    ]
    assert len(lines) == newer
    torch_settings._of_process.cache_clear()
