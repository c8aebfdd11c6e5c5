"""What SIMD code is written with: Python that makes LLVM vectors. It needs llvmlite, but not numba.

`simd.emitted` makes of it functions that kernels call, `machine.function` C functions. Results are the same on every
CPU, bit by bit: whatever the instructions, sums have one order, and `fma` rounds once.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir as llvm

from quantkit.codegen import jit
from quantkit.codegen.ir_values import F16, F32, I8, I16, I32, I64, Value, Variable, element_of, vector, wrapped

_FRAME = 4096  # bytes for vectors `in_memory`
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


class IrBuilder:
    """What a function under `@emitted` writes its code with."""

    def __init__(self, builder: llvm.IRBuilder):
        self.builder = builder
        self.isa = jit.isa()
        self._tables: dict[tuple[int, ...], llvm.Value] = {}
        self._frame: tuple[llvm.Value, Value] | None = None  # where `in_memory` puts vectors, and its address
        self._framed = 0  # bytes of it that are taken

    # ----------------------------------------------------------------------------------------- constants and memory

    def constant(self, kind: llvm.Type, number: float | Sequence[float]) -> Value:
        """A constant; one number fills all lanes of a vector, a sequence gives each its own."""
        if isinstance(kind, llvm.VectorType):
            each = list(number) if isinstance(number, Sequence) else [number] * kind.count
            return Value(self, llvm.Constant(kind, [llvm.Constant(kind.element, v) for v in each]))
        return Value(self, llvm.Constant(kind, number))

    def zero(self, kind: llvm.Type) -> Value:
        return Value(self, llvm.Constant(kind, None if isinstance(kind, llvm.VectorType) else 0))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def _pointer(self, kind: llvm.Type, address: Value) -> llvm.Value:
        return self.builder.inttoptr(address.ir, kind.as_pointer())

    def load(self, kind: llvm.Type, address: Value) -> Value:
        return Value(self, self.builder.load(self._pointer(kind, address), align=1))

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(value.ir, self._pointer(value.type, address), align=1)

    def prefetch(self, address: Value, near: bool = True) -> None:
        """Ask for the cache line at an address, which need not be readable: into the first cache or the second."""
        byte = I8.as_pointer()
        function = self._declared("llvm.prefetch.p0", llvm.VoidType(), [byte, I32, I32, I32])
        read, keep, data = (llvm.Constant(I32, v) for v in (0, 3 if near else 2, 1))
        self.builder.call(function, [self._pointer(I8, address), read, keep, data])

    def table(self, numbers: Sequence[int], element: llvm.Type) -> Value:
        """The address of constant integers in the compiled code."""
        key = element.width, *numbers
        if key not in self._tables:
            kind = llvm.ArrayType(element, len(numbers))
            constants = [llvm.Constant(element, wrapped(int(v), element.width)) for v in numbers]
            constant = llvm.Constant(kind, constants)
            module = self.builder.module
            table = llvm.GlobalVariable(module, kind, module.get_unique_name("table"))
            table.linkage, table.global_constant, table.initializer = "internal", True, constant
            self._tables[key] = table
        return Value(self, self.builder.ptrtoint(self._tables[key], I64))

    def integer(self, number: int) -> Value:
        return self.constant(I64, number)

    # ------------------------------------------------------------------------------------------------------ control

    @contextlib.contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)` with an int64 index."""
        first, last = (v if isinstance(v, Value) else self.integer(v) for v in (start, stop))
        index = self.variable(first)
        block = self.builder.append_basic_block
        head, body, after = block("loop"), block("body"), block("after")
        self.builder.branch(head)
        self.builder.position_at_end(head)
        i = index.get()
        self.builder.cbranch(self.builder.icmp_signed("<", i.ir, last.ir), body, after)
        self.builder.position_at_end(body)
        yield i
        index.set(i + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    def _declared(self, name: str, returns: llvm.Type, parameters: Sequence[llvm.Type]) -> llvm.Function:
        """A function outside, by name."""
        found = self.builder.module.globals.get(name)
        return found or llvm.Function(self.builder.module, llvm.FunctionType(returns, parameters), name)

    def call(self, name: str, kind: llvm.Type, *args: Value) -> Value:
        """Call an LLVM intrinsic (or C function) by name."""
        function = self._declared(name, kind, [a.type for a in args])
        return Value(self, self.builder.call(function, [a.ir for a in args]))

    # ------------------------------------------------------------------------------------------------------- lanes

    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with the scalar in every lane."""
        empty = llvm.Constant(vector(lanes, value.type), llvm.Undefined)
        first = self.builder.insert_element(empty, value.ir, llvm.Constant(I32, 0))
        return self.shuffle(Value(self, first), None, [0] * lanes)

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes picked from `a` followed by `b`, by constant index."""
        other = b.ir if b is not None else llvm.Constant(a.type, llvm.Undefined)
        mask = llvm.Constant(vector(len(lanes), I32), [llvm.Constant(I32, i) for i in lanes])
        return Value(self, self.builder.shuffle_vector(a.ir, other, mask))

    def join(self, a: Value, b: Value) -> Value:
        """The lanes of `a`, then those of `b`."""
        return self.shuffle(a, b, range(a.lanes + b.lanes))

    def part(self, a: Value, first: int, lanes: int) -> Value:
        return self.shuffle(a, None, range(first, first + lanes))

    def insert(self, a: Value, index: int, value: Value) -> Value:
        return Value(self, self.builder.insert_element(a.ir, value.ir, llvm.Constant(I32, index)))

    def _fold(self, v: Value, combine: Callable[[Value, Value], Value]) -> Value:
        while v.lanes > 1:
            half = v.lanes // 2
            low, high = self.part(v, 0, half), self.part(v, half, half)
            v = combine(low, high)
        return v.lane(0)

    def sum(self, v: Value) -> Value:
        """Sum of the lanes, added in halves."""
        return self._fold(v, lambda a, b: a + b)

    def sum4(self, a: Value, b: Value, c: Value, d: Value) -> Value:
        """The sums of four vectors of 16 as one vector of 4: three halvings for all instead of four for each."""

        def fold(x: Value, y: Value, run: int) -> Value:
            """In every 2 * run lanes the second run added to the first; what is left of x, then of y."""
            first = [i for i in range(32) if i // run % 2 == 0]
            return self.shuffle(x, y, first) + self.shuffle(x, y, [i + run for i in first])

        v = fold(fold(a, b, 8), fold(c, d, 8), 4)  # four lanes each, in order
        v = v + self.shuffle(v, None, [i ^ 1 for i in range(16)])
        v = v + self.shuffle(v, None, [i ^ 2 for i in range(16)])
        return self.shuffle(v, None, [0, 4, 8, 12])

    def largest(self, v: Value) -> Value:
        """Largest lane of a float vector."""
        return self._fold(v, self.max)

    def lookup(self, table: Sequence[int], index: Value) -> Value:
        """`table[index]` for bytes and a vector of 16 or 32 indices: 16 of them and indices 0..15, or 32 or 64 of them
        and indices taken modulo that."""
        lanes = index.lanes
        table = [wrapped(byte, 8) for byte in table]
        if len(table) > 16:
            return self._long_lookup(table, index)
        names = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b"}
        if self.isa != "generic":
            return self.call(names[lanes], index.type, self.constant(index.type, table * (lanes // 16)), index)
        value = self.constant(index.type, table[0])
        for code in range(1, 16):  # compare and select: no byte shuffle is certain to exist
            here = self.builder.icmp_unsigned("==", index.ir, self.constant(index.type, code).ir)
            value = Value(self, self.builder.select(here, self.constant(index.type, table[code]).ir, value.ir))
        return value

    def _long_lookup(self, table: list[int], index: Value) -> Value:
        """A lookup in each half of the table, of which one bit of the index chooses; vpermb does 32 bytes at once."""
        if len(table) == 32 == index.lanes and self.isa.startswith("avx512") and "avx512vbmi" in jit.cpu_features():
            return self.call("llvm.x86.avx512.permvar.qi.256", index.type, self.constant(index.type, table), index)
        half = len(table) // 2
        within = index & 15 if half == 16 else index
        low, high = self.lookup(table[:half], within), self.lookup(table[half:], within)
        is_high = self.builder.icmp_unsigned("!=", (index & half).ir, self.zero(index.type).ir)
        return Value(self, self.builder.select(is_high, high.ir, low.ir))

    def where_bits(self, v: Value, masks: Sequence[int], number: int) -> Value:
        """`number` in the byte lanes where a bit of the lane's mask is set in `v`, 0 elsewhere."""
        masked = v & self.constant(v.type, [wrapped(m, 8) for m in masks])
        is_set = self.builder.icmp_unsigned("!=", masked.ir, self.zero(v.type).ir)
        return Value(self, self.builder.select(is_set, self.constant(v.type, number).ir, self.zero(v.type).ir))

    def integer_of(self, v: Value, mask: int) -> Value:
        """An integer of a bit for each lane, lane 0 the lowest: whether the lane has a bit of `mask` set."""
        is_set = self.builder.icmp_unsigned("!=", (v & mask).ir, self.zero(v.type).ir)
        return Value(self, self.builder.bitcast(is_set, llvm.IntType(v.lanes)))

    def between(self, v: Value, first: Value, last: Value) -> Value:
        """Where first <= v < last, signed integers: what `choose` takes."""
        low, high = (self.builder.icmp_signed(op, v.ir, b.ir) for op, b in ((">=", first), ("<", last)))
        return Value(self, self.builder.and_(low, high))

    def choose(self, where: Value, a: Value, b: Value) -> Value:
        """Lanes of `a` where it holds, of `b` elsewhere."""
        return Value(self, self.builder.select(where.ir, a.ir, b.ir))

    def bits(self, v: Value) -> Value:
        """The bits of an integer, lowest first, as lanes: what `choose` takes."""
        return v.view(vector(v.type.width, llvm.IntType(1)))

    def any_bits(self, v: Value, masks: Sequence[int]) -> Value:
        """Where a bit of the lane's mask is set in `v`: what `choose` takes."""
        masked = v & self.constant(v.type, [wrapped(m, v.type.element.width) for m in masks])
        return Value(self, self.builder.icmp_unsigned("!=", masked.ir, self.zero(v.type).ir))

    def less(self, a: Value, b: Value) -> Value:
        """Where a < b, signed integers: what `choose` takes."""
        return Value(self, self.builder.icmp_signed("<", a.ir, b.ir))

    def below(self, v: Value, bound: int) -> Value:
        """Where v < bound, unsigned integers: what `choose` takes."""
        return Value(self, self.builder.icmp_unsigned("<", v.ir, v._operand(bound)))

    def multiply_high(self, a: Value, b: Value) -> Value:
        """Upper halves of the products of unsigned 16-bit integers."""
        return ((a.unsigned(I32) * b.unsigned(I32)) >> 16).narrow(I16)

    def in_memory(self, v: Value) -> Value:
        """The address of a copy of a vector, for loads of its parts.

        LLVM does not see that they read what was stored: it would extract lanes instead, two instructions each.
        """
        if self._frame is None:
            with self.builder.goto_entry_block():
                place = self.builder.alloca(llvm.ArrayType(I8, _FRAME))
                place.align = 32
                kind = llvm.FunctionType(I64, [I64])
                hidden = self.builder.call(llvm.InlineAsm(kind, "", "=r,0", False), [self.builder.ptrtoint(place, I64)])
            self._frame = place, Value(self, hidden)
        place, address = self._frame
        width = getattr(element_of(v.type), "width", 32)  # float types do not say theirs
        first, self._framed = self._framed, self._framed + -(-v.lanes * width // 256) * 32
        assert self._framed <= _FRAME, "too many vectors in memory"
        target = self.builder.gep(place, [llvm.Constant(I32, 0), llvm.Constant(I32, first)])
        self.builder.store(v.ir, self.builder.bitcast(target, v.type.as_pointer()), align=32)
        return address + first

    # ---------------------------------------------------------------------------------------------------- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c of float32, rounded once: by the instruction, which x86 has since AVX2 and other CPUs always."""
        if self.isa != "generic" or not _X86:
            return self.call(f"llvm.fma.{self._suffix(a.type)}", a.type, a, b, c)
        many = isinstance(a.type, llvm.VectorType)
        real, bits = (vector(a.lanes, k) if many else k for k in (llvm.DoubleType(), I64))
        x, y, z = (self.builder.fpext(v.ir, real) for v in (a, b, c))
        product = self.builder.fmul(x, y)  # exact
        return Value(self, self.builder.fptrunc(self._add_to_odd(product, z, bits), a.type))

    def _add_to_odd(self, x: llvm.Value, y: llvm.Value, bits: llvm.Type) -> llvm.Value:
        """x + y of doubles, to the neighbour with an odd last bit where it is not exact.

        Rounded to float32, that is x + y rounded once (Boldo and Melquiond, Emulation of FMA and correctly rounded
        sums, 2008). What the sum lacks is exact by Knuth's TwoSum; it is not a number where the sum is not finite.
        """
        do, real, zero = self.builder, x.type, llvm.Constant(x.type, None if isinstance(bits, llvm.VectorType) else 0.0)
        total = do.fadd(x, y)
        part = do.fsub(total, x)
        lacking = do.fadd(do.fsub(x, do.fsub(total, part)), do.fsub(y, part))
        number = Value(self, do.bitcast(total, bits))
        is_even = do.icmp_signed("==", (number & 1).ir, self.zero(bits).ir)
        outward = do.icmp_signed("==", do.fcmp_ordered(">", lacking, zero), do.fcmp_ordered(">", total, zero))
        step = do.select(outward, self.constant(bits, 1).ir, self.constant(bits, -1).ir)
        moved = do.bitcast(do.add(number.ir, step), real)
        return do.select(do.and_(is_even, do.fcmp_ordered("!=", lacking, zero)), moved, total)

    def max(self, a: Value, b: Value) -> Value:
        """The larger of two floats; `a` where either is NaN."""
        return Value(self, self.builder.select(self.builder.fcmp_ordered("<", a.ir, b.ir), b.ir, a.ir))

    def min(self, a: Value, b: Value) -> Value:
        """The smaller of two floats; `a` where either is NaN."""
        return Value(self, self.builder.select(self.builder.fcmp_ordered(">", a.ir, b.ir), b.ir, a.ir))

    def absolute(self, a: Value) -> Value:
        return self.call(f"llvm.fabs.{self._suffix(a.type)}", a.type, a)

    def nearest(self, a: Value) -> Value:
        """float32 below 2^22 in magnitude to the nearest int32, ties to even."""
        kind = vector(a.lanes, I32) if isinstance(a.type, llvm.VectorType) else I32
        magic = 12582912.0  # 1.5 * 2^23: the addition leaves the integer in the low bits
        return (a + magic).view(kind) - 0x4B400000

    def _suffix(self, kind: llvm.Type) -> str:
        return f"v{kind.count}f32" if isinstance(kind, llvm.VectorType) else "f32"

    def exp(self, x: Value) -> Value:
        """e^x of float32 within 2 units in the last place; 0 below -87.3, as of 88 above 88, NaN of NaN.

        x = k ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7; 2^k through the exponent bits. The
        only exponential of the CPU's kernels: the C library's differs from system to system.
        """
        kind = x.type
        tiny = self.builder.fcmp_ordered("<", x.ir, self.constant(kind, -87.3).ir)
        x = self.min(self.max(x, self.constant(kind, -87.3)), self.constant(kind, 88.0))
        k = self.nearest(x * 1.4426950408889634)
        real = k.real()
        r = self.fma(real, self.constant(kind, -0.693145751953125), x)
        r = self.fma(real, self.constant(kind, -1.428606765330187e-06), r)
        p = self.constant(kind, 1 / 5040)
        for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            p = self.fma(p, r, self.constant(kind, term))
        power = ((k + 127) << 23).view(kind)
        return Value(self, self.builder.select(tiny, self.zero(kind).ir, (p * power).ir))

    # -------------------------------------------------------------------------------------------------- half floats

    def half_to_float(self, bits: Value) -> Value:
        """The values of halves given as 16-bit integers. Without F16C by shifting: never a call of the C library."""
        many = isinstance(bits.type, llvm.VectorType)
        if self.isa != "generic":
            half = vector(bits.lanes, F16) if many else F16
            return Value(self, self.builder.fpext(bits.view(half).ir, vector(bits.lanes, F32) if many else F32))
        kind = vector(bits.lanes, F32) if many else F32
        wide = bits.unsigned(I32)
        sign = (wide & 0x8000) << 16
        # Exponent and mantissa moved in place; the product re-biases the exponent and makes subnormals normal.
        small = ((wide & 0x7FFF) << 13).view(kind) * 2.0**112
        special = self.builder.icmp_unsigned(">=", (wide & 0x7FFF).ir, self.constant(wide.type, 0x7C00).ir)
        infinite = ((wide & 0x7FFF) << 13) | 0x7F800000
        magnitude = self.builder.select(special, infinite.ir, small.view(wide.type).ir)
        return (Value(self, magnitude) | sign).view(kind)

    def float_to_half(self, x: Value) -> Value:
        """Bits of the nearest halves of a float32 vector, ties to even; too large becomes Inf."""
        bits = vector(x.lanes, I16)
        if self.isa != "generic":
            return Value(self, self.builder.fptrunc(x.ir, vector(x.lanes, F16))).view(bits)
        wide = x.view(vector(x.lanes, I32))
        sign = (wide >> 16) & 0x8000
        wide = wide & 0x7FFFFFFF
        # Adding 0.5 rounds subnormal halves to multiples of 2^-24; normal ones are rounded on their bits.
        subnormal = (wide.view(x.type) + 0.5).view(wide.type) - 0x3F000000
        normal = (wide + (0xC8000FFF - (1 << 32)) + ((wide >> 13) & 1)) >> 13
        is_small = self.builder.icmp_unsigned("<", wide.ir, self.constant(wide.type, 0x38800000).ir)
        is_large = self.builder.icmp_unsigned(">=", wide.ir, self.constant(wide.type, 0x47800000).ir)
        is_nan = self.builder.icmp_unsigned(">", wide.ir, self.constant(wide.type, 0x7F800000).ir)
        large = self.builder.select(is_nan, self.constant(wide.type, 0x7E00).ir, self.constant(wide.type, 0x7C00).ir)
        half = self.builder.select(is_large, large, self.builder.select(is_small, subnormal.ir, normal.ir))
        return (Value(self, half) | sign).narrow(I16)

    # --------------------------------------------------------------------------------------- products of small integers

    def dot4(self, total: Value, a: Value, b: Value, largest: int = 255) -> Value:
        """total[i] + sum over j of a[4i+j] * b[4i+j], a bytes 0..largest, b signed bytes, total int32.

        One vpdpbusd where there is one. vpmaddubsw adds two products in 16 bits, which holds them up to
        `largest` = 127; otherwise bytes are widened first.
        """
        lanes = total.lanes
        if self.isa == "avx512vnni" and lanes in (8, 16):
            name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
            return self.call(name, total.type, total, a.view(total.type), b.view(total.type))
        if self.isa != "generic" and largest <= 127 and lanes in (8, 16):
            return total + self.pairs(self.byte_pairs(a, b))
        halves = vector(2 * lanes, I16)
        a, b = a.view(halves), b.view(halves)
        even = self.multiply_pairs(a & 0xFF, (b << 8).signed_shift(8))
        return total + even + self.multiply_pairs(a >> 8, b.signed_shift(8))

    def byte_pairs(self, a: Value, b: Value) -> Value:
        """int16 sums of neighbouring products of bytes `a` (unsigned) and `b` (signed), modulo 2^16 at worst."""
        names = {16: "llvm.x86.avx2.pmadd.ub.sw", 32: "llvm.x86.avx512.pmaddubs.w.512"}
        if found := self._by_instruction(names, vector(a.lanes // 2, I16), a, b):
            return found
        halves = vector(a.lanes // 2, I16)
        a, b = a.view(halves), b.view(halves)
        return (a & 0xFF) * (b << 8).signed_shift(8) + (a >> 8) * b.signed_shift(8)

    def pairs(self, v: Value) -> Value:
        """int32 sums of neighbouring int16."""
        return self.multiply_pairs(v, self.constant(v.type, 1))

    def multiply_pairs(self, a: Value, b: Value) -> Value:
        """int32 sums of neighbouring products of signed int16: pmaddwd."""
        names = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
        wide = vector(a.lanes // 2, I32)
        if found := self._by_instruction(names, wide, a, b):
            return found
        a, b = a.view(wide), b.view(wide)
        low = (a << 16).signed_shift(16) * (b << 16).signed_shift(16)
        return low + a.signed_shift(16) * b.signed_shift(16)

    def _by_instruction(self, names: dict[int, str], kind: llvm.VectorType, a: Value, b: Value) -> Value | None:
        """One instruction, or the widest there is for each part. `names`: by the lanes of what it makes, of `kind`."""
        bits = (512 if self.isa.startswith("avx512") else 256 if self.isa == "avx2" else 128) if _X86 else 0
        known = [lanes for lanes in names if lanes <= kind.count and lanes * kind.element.width <= bits]
        if not known:
            return None
        if max(known) == kind.count:
            return self.call(names[kind.count], kind, a, b)
        half, kind = a.lanes // 2, vector(kind.count // 2, kind.element)
        parts = (self._by_instruction(names, kind, self.part(a, i, half), self.part(b, i, half)) for i in (0, half))
        low, high = parts
        return None if low is None or high is None else self.shuffle(low, high, range(2 * kind.count))

    # ------------------------------------------------------------------------------------------------------- threads

    def atomic_load(self, address: Value) -> Value:
        pointer = self._pointer(I64, address)
        return Value(self, self.builder.load_atomic(pointer, "acquire", 8))

    def atomic_store(self, value: Value, address: Value) -> None:
        self.builder.store_atomic(value.ir, self._pointer(I64, address), "release", 8)

    def atomic_add(self, value: Value, address: Value) -> Value:
        """Add to an int64 in memory; the value before."""
        return Value(self, self.builder.atomic_rmw("add", self._pointer(I64, address), value.ir, "acq_rel"))

    def pause(self) -> None:
        """Tell the core that this is a waiting loop."""
        if _X86:
            self.builder.call(self._declared("llvm.x86.sse2.pause", llvm.VoidType(), []), [])

    def call_address(self, address: Value, *args: Value) -> None:
        """Call a C function `void(int64, ...)` that stands at `address`."""
        self._call(llvm.VoidType(), address, *args)

    def ask_address(self, address: Value, *args: Value) -> Value:
        """What a C function `int64(int64, ...)` returns that stands at `address`."""
        return Value(self, self._call(I64, address, *args))

    def _call(self, returns: llvm.Type, address: Value, *args: Value) -> llvm.Value:
        kind = llvm.FunctionType(returns, [I64] * len(args))
        return self.builder.call(self._pointer(kind, address), [a.ir for a in args])
