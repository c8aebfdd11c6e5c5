"""C functions written with `ir_builder.IrBuilder` alone: compiled, cached and run without importing numba.

    @function
    def add(ir, x, y, out):                # ir: IrBuilder; the others int64 values
        e.store(e.load(I64, x) + e.load(I64, y), out)

    add(a.ctypes.data, b.ctypes.data, c.ctypes.data)     # releases the GIL

What LLVM makes of a body is cached as object code, one file a function (`disk_cache`). The name of the file is a digest
of all that the code depends on: the versions of llvmlite and LLVM, triple, CPU and features it is for, and every
quantkit source the body can reach (`jit.source_digest`). Bodies may call LLVM's intrinsics and the C library, which any
process has; nothing of numba's.
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

from quantkit.codegen import disk_cache, jit

_OBJECT_VERSION = 1  # of what _compile does with a body; the sources tell all else
_lock = threading.RLock()
_kept: list[Any] = []  # engines, which own the code


class Function:
    """A C function `void(int64, ...)`. Calling it releases the GIL; `address` is its entry point as an integer."""

    def __init__(self, body: Callable):
        functools.update_wrapper(self, body)
        self.body = body
        self.parameters = len(inspect.signature(body).parameters) - 1
        self.compiled = False  # in this process, not taken from the disk

    @functools.cached_property
    def address(self) -> int:
        with _lock:
            if "address" in self.__dict__:  # made while we waited
                return int(self.__dict__["address"])
            return self._load(self._object())

    @functools.cached_property
    def _entry(self) -> Callable[..., None]:
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.parameters)(self.address)

    def __call__(self, *args: int) -> None:
        self._entry(*args)

    @property
    def path(self) -> Path | None:
        """Where its object code is cached; None where its source is not known."""
        identity = jit.identity(self.body)
        if identity is None:
            return None
        cpu, features = jit.target_cpu()
        parts = (_OBJECT_VERSION, *_versions(), cpu, features, identity)
        key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return disk_cache.root() / f"object-{cpu}" / f"{self.body.__name__}-{key[:40]}.o"

    def _object(self) -> bytes:
        """The object code: from the disk, or compiled and put there."""
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
        made = llvm.Function(module, kind, self.body.__name__)
        builder = llvm.IRBuilder(made.append_basic_block())
        emit = IrBuilder(builder)
        self.body(emit, *(Value(emit, parameter) for parameter in made.args))
        builder.ret_void()
        machine = _target_machine()
        module.data_layout = str(machine.target_data)
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        return machine.emit_object(parsed)

    def _load(self, code: bytes) -> int:
        from llvmlite import binding

        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _kept.append(engine)
        return engine.get_function_address(self.body.__name__)


def function(body: Callable) -> Function:
    """Decorator: `body(ir, *values)`, called with an IrBuilder and int64 values, as a C function."""
    return Function(body)


@functools.cache
def _versions() -> tuple[str, ...]:
    import llvmlite
    from llvmlite import binding

    return llvmlite.__version__, *map(str, binding.llvm_version_info), binding.get_process_triple()


def _target_machine() -> Any:
    """LLVM for the CPU that kernels are made for. An engine takes its own: it disposes of it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = jit.target_cpu()
    triple = binding.get_process_triple()
    reloc = "static" if triple.startswith("x86") else "default"  # what LLVM's JIT asks for
    target = binding.Target.from_triple(triple)
    return target.create_target_machine(cpu, features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True)
