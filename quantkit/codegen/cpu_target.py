"""The CPU that code is compiled for: its name, its features, and the SIMD code path (`isa`) that kernels take.

Compiled code is for the host. `NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES`, which numba reads too, name another CPU:
`NUMBA_CPU_NAME=haswell` tests the AVX2 path on a CPU with AVX-512.
"""

from __future__ import annotations

import functools
import os

# CPUs by LLVM's names; they count only when NUMBA_CPU_NAME gives a name without features.
_VNNI_CPUS = ("cascadelake", "cooperlake", "icelake", "tigerlake", "rocketlake", "sapphirerapids", "emeraldrapids",
              "graniterapids", "znver4", "znver5")  # fmt: skip
_AVX512_CPUS = ("skylake-avx512", "skx", "cannonlake", "x86-64-v4")
_AVX2_CPUS = ("haswell", "broadwell", "skylake", "core-avx2", "core-avx-i", "alderlake", "raptorlake", "meteorlake",
              "arrowlake", "lunarlake", "znver1", "znver2", "znver3", "x86-64-v3")  # fmt: skip


@functools.cache
def target_cpu() -> tuple[str, str]:
    """Name of the CPU that code is compiled for, and its features as LLVM spells them ("+avx2,-avx512f").

    The host's, or those of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES. A name without features means all features that
    LLVM knows of that CPU; the second string is then empty.
    """
    from llvmlite import binding

    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name or features:
        return name or binding.get_host_cpu_name(), features or ""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features of the CPU that code is compiled for; for a CPU given by name, those that `isa` depends on."""
    name, features = target_cpu()
    if features:
        return frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
    vnni = {"avx512vnni"} if name.startswith(_VNNI_CPUS) else set()
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} if vnni or name in _AVX512_CPUS else set()
    return frozenset(vnni | avx512 | ({"avx2", "fma", "f16c"} if avx512 or name in _AVX2_CPUS else set()))


@functools.cache
def isa() -> str:
    """The SIMD code path: "avx512vnni", "avx512" (with BW and VL), "avx2" (with FMA and F16C) or "generic"."""
    has = cpu_features()
    if {"avx512f", "avx512bw", "avx512vl"} <= has:
        return "avx512vnni" if "avx512vnni" in has else "avx512"
    return "avx2" if {"avx2", "fma", "f16c"} <= has else "generic"
