"""GPU instructions that kernels use, and their simulation; the only module that imports numba.cuda.

With NUMBA_ENABLE_CUDASIM=1, kernels are plain Python. Then `words.SimulatedWords` reads a sub-block, sums over a warp
use shared memory (threads of a simulated warp do not run in lockstep), and the bytes of a word are added one by one.
Only this module and `words.py` know which of the two runs. `cuda` and `types` are numba's.

    inlined                       decorator of device functions
    SIMULATED                     whether kernels are simulated
    sub_block_reader(codec)       device function (data, start, row_bytes, row, number) -> codes, scales, mins
                                  and shifts of sub-block `number` of a row of the tensor at data[start]: tuples of 8,
                                  2, 2 and 2
    dot4(a, b, c)                 c + the products of four signed bytes
    signed_bytes(word)            float32 of the four signed bytes of a word. numba's own shifts of int32 give 64 bits,
                                  in which the sign of a byte that was shifted up and down again is lost
    bits_of, float_of_bits, half_of, bfloat_of, float_of_half, float_of_bfloat
    times(a, b), plus(a, b)       rounded each: never fused
    warp_sum, warp_max            over the 32 threads of a warp; *all threads of a block* call them together
    lanes_sum(value, lanes)       over runs of 4, 8, 16 or 32 of them
    lanes_largest(size, lanes)    the largest of magnitudes, none of which is negative; NaN where one is
    halves_of(a, b), bfloats_of   two floats as one word of two numbers, a in the low half
    load_words(array, i)          the 16 bytes from element i on as four int32, in one load; aligned
    load_floats(array, i)         as four float32
    store_words(array, i, a, b, c, d)   four words in one store; store_floats four float32
    shared_words(count)           device function () -> uint32[count] that a block shares, aligned for both
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quantkit.codegen import numba_loader
from quantkit.runtime.kernels.cuda.reader import Codec, Reader, SubBlock
from quantkit.runtime.kernels.cuda.words import DeviceWords, SimulatedWords

numba_loader.refuse_numba_config()  # before the import that would read the file

from numba import config, cuda  # noqa: E402

SIMULATED = bool(config.ENABLE_CUDASIM)
WARP = 32
FULL = 0xFFFFFFFF


def read_sub_block(
    ir: Any, codec: Codec, start: Any, row_bytes: Any, row: Any, number: Any, split: Callable
) -> SubBlock:
    """Run a codec; `split(value, n)` gives quotient and remainder, of powers of two."""
    group, of_group = split(row, codec.rows)
    block, of_block = split(number, codec.columns // 32)
    first = start + ir.wide(group) * (row_bytes * codec.rows)
    block_start = first + codec.head + ir.wide(block) * codec.nbytes
    return codec.read(Reader(ir, codec, first, block_start, of_group, of_block, row_bytes))


def inlined(function: Callable) -> Any:
    """Decorator: a device function. Inlined by numba, which otherwise asks the driver for a device to compile it."""
    return cuda.jit(device=True)(function) if SIMULATED else cuda.jit(device=True, inline="always")(function)


def _two(values: Sequence[Any]) -> tuple:
    """A value for each half of a sub-block, of one or two; () of none."""
    return (values[0], values[-1]) if values else ()


if SIMULATED:

    def sub_block_reader(codec: Codec) -> Callable[..., tuple]:
        """The function (data, start, row_bytes, row, number) -> (codes, scales, mins, shifts) of a sub-block."""

        def read(data, start, row_bytes, row, number):
            e = SimulatedWords(data)
            sub_block = read_sub_block(e, codec, int(start), int(row_bytes), e.word(row), e.word(number), _split_plain)
            codes = tuple(
                np.int64(np.uint32(c).view(np.int32)) for c in sub_block.codes
            )  # numba computes so with int32
            none = (np.float32(0),) * 2
            return codes, _two(sub_block.scales), _two(sub_block.mins) or none, _two(sub_block.shifts) or none

        return read

    def _split_plain(value, n):
        return type(value)(int(value) // n), type(value)(int(value) % n)

    def dot4(a, b, c):
        """c + the sum of products of the four signed bytes of a and b."""
        return np.uint32(SimulatedWords(None).dot(a, b, c)).view(np.int32)

    def signed_bytes(word):
        """The four signed bytes of a word as float32."""
        return tuple(np.float32((int(word) >> 8 * i & 255 ^ 128) - 128) for i in range(4))

    def bits_of(value):
        """The bits of a float32."""
        return np.float32(value).view(np.uint32)

    def float_of_bits(bits):
        """The float32 of 32 bits."""
        return np.uint32(bits).view(np.float32)

    def half_of(value):
        """The bits of a float as a half, rounded to nearest even."""
        with np.errstate(over="ignore"):
            return np.float32(value).astype(np.float16).view(np.uint16)

    def float_of_half(bits):
        """The float32 of the bits of a half."""
        return np.float32(np.uint16(bits).view(np.float16))

    def bfloat_of(value):
        """The bits of a float as a bfloat16, rounded to nearest even."""
        bits = int(np.float32(value).view(np.uint32))
        if value != value:
            return np.uint16(0x7FFF)
        return np.uint16(bits + 0x7FFF + (bits >> 16 & 1) >> 16 & 0xFFFF)

    def halves_of(a, b):
        """Two floats as halves in one word."""
        return np.uint32(half_of(a)) | np.uint32(half_of(b)) << np.uint32(16)

    def bfloats_of(a, b):
        """Two floats as bfloat16 in one word."""
        return np.uint32(bfloat_of(a)) | np.uint32(bfloat_of(b)) << np.uint32(16)

    def float_of_bfloat(bits):
        """The float32 of the bits of a bfloat16."""
        return np.uint32(int(bits) << 16).view(np.float32)

    def times(a, b):
        """a * b, rounded by itself: not fused with an addition."""
        return np.float32(a) * np.float32(b)

    def plus(a, b):
        """a + b, rounded by itself: not fused with a product."""
        return np.float32(a) + np.float32(b)

    @inlined
    def _warp(value, combine, lanes=WARP):
        shared = cuda.shared.array(1024, np.float32)
        i = cuda.threadIdx.x
        cuda.syncthreads()
        shared[i] = value
        cuda.syncthreads()
        first = i - i % lanes
        result = shared[first]
        for k in range(1, min(lanes, cuda.blockDim.x - first)):
            result = combine(result, shared[first + k])
        cuda.syncthreads()
        return np.float32(result)

    def warp_sum(value):
        """The sum of a value over the threads of a warp."""
        return _warp(value, lambda a, b: a + b)

    def lanes_sum(value, lanes):
        """The sum over `lanes` neighbouring threads of a warp, a power of two."""
        return _warp(value, lambda a, b: a + b, lanes)

    def lanes_largest(size, lanes):
        """The largest of magnitudes over `lanes` neighbouring threads of a warp, a power of two; NaN where one is."""
        return _warp(size, lambda a, b: a if a != a or a > b else b, lanes)

    def warp_max(value):
        """The maximum of a value over the threads of a warp."""
        return _warp(value, max)

    def load_words(array, i):
        """The 16 bytes from element i on as four words."""
        return _load_sixteen(array, i, np.int32).astype(np.int64)

    def load_floats(array, i):
        """The 16 bytes from element i on as four float32."""
        return _load_sixteen(array, i, np.float32)

    def _load_sixteen(array, i, kind):
        count = 16 // array.dtype.itemsize
        assert i % count == 0, "a load is not aligned"
        return np.frombuffer(b"".join(array[i + j].tobytes() for j in range(count)), kind)

    def store_words(array, i, a, b, c, d):
        """Four words to index i and the next three."""
        assert i % 4 == 0, "a store is not aligned"
        array[i], array[i + 1], array[i + 2], array[i + 3] = a, b, c, d

    store_floats = store_words

    def shared_words(count: int) -> Callable[[], Any]:
        """A device function that gives the memory of uint32[count] that a block shares; one in a kernel."""
        return inlined(lambda: cuda.shared.array(count, np.uint32))

else:
    from llvmlite import ir as llvm
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    from quantkit.codegen.ir_values import F32, I32, Value

    def sub_block_reader(codec: Codec) -> Callable[..., tuple]:
        pair = types.UniTuple(types.float32, 2)
        result = types.Tuple((types.UniTuple(types.int32, 8), pair, pair, pair))

        @intrinsic
        def read(typing_context, data, start, row_bytes, row, number):
            signature = result(data, types.int64, types.int64, types.int32, types.int32)

            def generate(context, builder, signature, args):
                array = cgutils.create_struct_proxy(signature.args[0])(context, builder, args[0])
                e = DeviceWords(builder, array.data)
                start, row_bytes, row, number = (Value(e, a) for a in args[1:])
                sub_block = read_sub_block(e, codec, start, row_bytes, row, number, _split)
                none = (e.constant(F32, 0.0),) * 2
                mins, shifts = _two(sub_block.mins) or none, _two(sub_block.shifts) or none
                parts = zip(signature.return_type, (sub_block.codes, _two(sub_block.scales), mins, shifts))
                tuples = [context.make_tuple(builder, kind, [v.ir for v in values]) for kind, values in parts]
                return context.make_tuple(builder, signature.return_type, tuples)

            return signature, generate

        return read

    def _split(value: Value, n: int) -> tuple[Value, Value]:
        """Of a word that is not negative."""
        return (value >> n.bit_length() - 1, value & n - 1) if n > 1 else (value, value & 0)

    def _assembly(text: str, kinds: str, result: Any, *parameters: Any) -> Any:
        """A device function that is one instruction."""
        plain = {types.int32: I32, types.uint32: I32, types.float32: F32, types.uint16: llvm.IntType(16)}

        def typed(typing_context, *args):
            def generate(context, builder, signature, values):
                kind = llvm.FunctionType(plain[result], [plain[p] for p in parameters])
                return builder.asm(kind, text, kinds, values, False)

            return result(*parameters), generate

        if len(parameters) == 1:
            return intrinsic(lambda typing_context, a: typed(typing_context, a))
        if len(parameters) == 2:
            return intrinsic(lambda typing_context, a, b: typed(typing_context, a, b))
        return intrinsic(lambda typing_context, a, b, c: typed(typing_context, a, b, c))

    _i, _f, _h, _w = types.int32, types.float32, types.uint16, types.uint32
    dot4 = _assembly("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", _i, _i, _i, _i)
    halves_of = _assembly("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", _w, _f, _f)
    bfloats_of = _assembly("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", _w, _f, _f)
    # By a word of two: the assembler of CUDA 13.0 makes the byte of a number of one that is stored by bytes.
    _low_half, _low_bfloat = (
        _assembly(f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; mov.b32 $0, {{h, h}}; }}", "=r,f", _w, _f)
        for kind in ("f16", "bf16")
    )
    float_of_half = _assembly("cvt.f32.f16 $0, $1;", "=f,h", _f, _h)
    times = _assembly("mul.rn.f32 $0, $1, $2;", "=f,f,f", _f, _f, _f)
    plus = _assembly("add.rn.f32 $0, $1, $2;", "=f,f,f", _f, _f, _f)

    @intrinsic
    def signed_bytes(typing_context, word):
        def generate(context, builder, signature, args):
            # The byte without its sign below the exponent of 2^23 is that number plus 2^23: two instructions a byte,
            # where extending its sign and converting it take three of half the speed.
            e = DeviceWords(builder, args[0])
            plain = Value(e, args[0]) ^ 0x80808080
            large = [e.permute(plain, e.word(0x4B000000), e.word(0x7440 + i)).view(F32) for i in range(4)]
            values = [builder.fsub(value.ir, llvm.Constant(F32, 2.0**23 + 128)) for value in large]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, 4)(types.int32), generate

    @inlined
    def half_of(value):
        return np.uint16(_low_half(value) & np.uint32(0xFFFF))

    @inlined
    def bfloat_of(value):
        return np.uint16(_low_bfloat(value) & np.uint32(0xFFFF))

    @intrinsic
    def bits_of(typing_context, value):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], I32)

        return types.uint32(types.float32), generate

    @intrinsic
    def float_of_bits(typing_context, bits):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], F32)

        return types.float32(types.uint32), generate

    @intrinsic
    def float_of_bfloat(typing_context, bits):
        def generate(context, builder, signature, args):
            wide = builder.shl(builder.zext(args[0], I32), llvm.Constant(I32, 16))
            return builder.bitcast(wide, F32)

        return types.float32(types.uint16), generate

    @inlined
    def warp_sum(value):
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(FULL, value, step)
        return value

    @inlined
    def lanes_sum(value, lanes):
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, value, step)
            value += other if step < lanes else np.float32(0)
        return value

    @inlined
    def lanes_largest(size, lanes):
        bits = np.int32(bits_of(size))  # in the order of the numbers, and those of NaN above all
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, bits, step)
            bits = max(bits, other) if step < lanes else bits
        return float_of_bits(np.uint32(bits))

    @inlined
    def warp_max(value):
        for step in (16, 8, 4, 2, 1):
            value = max(value, cuda.shfl_xor_sync(FULL, value, step))
        return value

    def _pointer_to_four(context, builder, array_type, array, index, kind):
        data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
        return builder.bitcast(builder.gep(data, [index]), llvm.VectorType(kind, 4).as_pointer())

    def _load_four(element, kind):
        @intrinsic
        def load(typing_context, array, index):
            def generate(context, builder, signature, args):
                pointer = _pointer_to_four(context, builder, signature.args[0], args[0], args[1], kind)
                loaded = builder.load(pointer, align=16)
                values = [builder.extract_element(loaded, llvm.Constant(I32, i)) for i in range(4)]
                return context.make_tuple(builder, signature.return_type, values)

            return types.UniTuple(element, 4)(array, types.int64), generate

        return load

    load_words, load_floats = _load_four(types.int32, I32), _load_four(types.float32, F32)

    def _store_four(element, kind):
        @intrinsic
        def store(typing_context, array, index, a, b, c, d):
            def generate(context, builder, signature, args):
                pointer = _pointer_to_four(context, builder, signature.args[0], args[0], args[1], kind)
                values = llvm.Constant(llvm.VectorType(kind, 4), llvm.Undefined)
                for i, value in enumerate(args[2:]):
                    values = builder.insert_element(values, value, llvm.Constant(I32, i))
                builder.store(values, pointer, align=16)
                return context.get_dummy_value()

            return types.void(array, types.int64, element, element, element, element), generate

        return store

    store_words, store_floats = _store_four(types.uint32, I32), _store_four(types.float32, F32)

    def shared_words(count: int) -> Callable[[], Any]:
        return inlined(lambda: cuda.shared.array(count, np.uint32, alignment=16))
