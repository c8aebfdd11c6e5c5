"""Native functions: C functions written with `ir_builder.IrBuilder`, compiled and run without numba.

    @function
    def add(ir, x, y, out):                # ir: IrBuilder; the others int64 values
        ir.store(ir.load(I64, x) + ir.load(I64, y), out)

    add(a.ctypes.data, b.ctypes.data, c.ctypes.data)     # releases the GIL

The body runs once, when the function is compiled; `simd` explains how to write one. LLVM's object code is cached, one
file a function (`disk_cache`). The file's name is a digest of the versions of llvmlite and LLVM, the target's triple,
CPU and features, and the sources that the body can reach (`digests.source_digest`). A body may call LLVM's intrinsics
and the C library, which every process has loaded, and nothing of numba's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.codegen import cpu_target, digests, disk_cache

_OBJECT_VERSION = 1  # raise it when `_compile` changes: the sources of a body need not import this module
_lock = threading.RLock()
_engines: list[Any] = []  # they own the machine code


class Function:
    """A C function `void(int64, ...)`. Calling it releases the GIL; `address` is its entry point as an integer."""

    def __init__(self, body: Callable[..., None]):
        functools.update_wrapper(self, body)
        self.body = body
        self.parameters = len(inspect.signature(body).parameters) - 1
        self.compiled = False  # by this process, not loaded from disk

    @functools.cached_property
    def address(self) -> int:
        """Entry point. The first use compiles the function, or loads it from disk."""
        with _lock:
            if "address" in self.__dict__:  # another thread made it while this one waited
                return int(self.__dict__["address"])
            return self._load(self._object())

    @functools.cached_property
    def _entry(self) -> Callable[..., None]:
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.parameters)(self.address)

    def __call__(self, *args: int) -> None:
        self._entry(*args)

    @property
    def path(self) -> Path | None:
        """The cache file of its object code; None where the source is unknown."""
        identity = digests.identity(self.body)
        if identity is None:
            return None
        cpu, features = cpu_target.target_cpu()
        parts = (_OBJECT_VERSION, *_versions(), cpu, features, identity)
        key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return disk_cache.root() / f"object-{cpu}" / f"{self.body.__name__}-{key[:40]}.o"

    def _object(self) -> bytes:
        """The object code: loaded from disk, or compiled and cached."""
        path = self.path
        code = None if path is None else disk_cache.read(path)
        if code is None:
            code = self._compile()
            self.compiled = True
            if path is not None:
                disk_cache.write(path, code)
        return code

    def _compile(self) -> bytes:
        from llvmlite import binding
        from llvmlite import ir as llvm

        from quantkit.codegen.ir_builder import IrBuilder
        from quantkit.codegen.ir_values import I64, Value

        module = llvm.Module(self.body.__name__)
        module.triple = binding.get_process_triple()
        kind = llvm.FunctionType(llvm.VoidType(), [I64] * self.parameters)
        native = llvm.Function(module, kind, self.body.__name__)
        builder = llvm.IRBuilder(native.append_basic_block())
        ir = IrBuilder(builder)
        self.body(ir, *(Value(ir, parameter) for parameter in native.args))
        builder.ret_void()
        machine = _target_machine()
        module.data_layout = str(machine.target_data)
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        code: bytes = machine.emit_object(parsed)
        return code

    def _load(self, code: bytes) -> int:
        from llvmlite import binding

        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        address: int = engine.get_function_address(self.body.__name__)
        return address


def function(body: Callable[..., None]) -> Function:
    """Decorator: a C function `void(int64, ...)` whose code `body(ir, *values)` builds; the values are int64."""
    return Function(body)


@functools.cache
def _versions() -> tuple[str, ...]:
    import llvmlite
    from llvmlite import binding

    return llvmlite.__version__, *map(str, binding.llvm_version_info), binding.get_process_triple()


def _target_machine() -> Any:
    """LLVM's target machine for `cpu_target.target_cpu()`. Each engine needs its own and disposes of it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = cpu_target.target_cpu()
    triple = binding.get_process_triple()
    reloc = "static" if triple.startswith("x86") else "default"  # as LLVM's JIT requires
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(cpu, features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True)
