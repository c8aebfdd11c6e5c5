"""`IrBuilder`: the operations that SIMD intrinsics and native functions are written with. Needs llvmlite, not numba.

`simd.simd_intrinsic` makes functions that kernels call, `native.function` C functions; `simd` explains how to write
them. Each method appends LLVM instructions and returns a `Value`. `isa` is the code path of the CPU that is compiled
for; where a method uses instructions of one path, it has a plain form for the others.

Results are the same on every CPU, bit by bit: sums have one order and `fma` rounds once, whatever the instructions.

| group | methods |
| --- | --- |
| constants, memory | `constant zero integer variable load store prefetch table in_memory` |
| control | `loop call` |
| lanes | `splat shuffle join part insert lookup sum sum4 largest` |
| masks | `less below between bits any_bits choose where_bits integer_of` |
| floats | `fma min max absolute nearest exp half_to_float float_to_half` |
| products of small integers | `dot4 byte_pairs pairs multiply_pairs multiply_high` |
| threads, C functions | `atomic_load atomic_store atomic_add pause call_address call_address_int64` |
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir as llvm

from quantkit.codegen import cpu_target
from quantkit.codegen.ir_values import F16, F32, I8, I16, I32, I64, Value, Variable, element_of, vector, wrapped

_FRAME = 4096  # bytes of stack for `in_memory`
# The ABI aligns stacks to 16 bytes only: vectors that LLVM spills would cross cache lines, in some threads and not in
# others, and products took up to 1.6 times as long.
_STACK_ALIGNMENT = 64
_X86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


class IrBuilder:
    """Appends LLVM instructions to a function. The first parameter of every SIMD intrinsic and native function."""

    def __init__(self, builder: llvm.IRBuilder):
        self.builder = builder
        builder.function.attributes.add("nounwind")  # llvmlite writes `alignstack` only beside another attribute
        builder.function.attributes.alignstack = _STACK_ALIGNMENT
        self.isa = cpu_target.isa()
        self._tables: dict[tuple[int, ...], llvm.Value] = {}
        self._frame: tuple[llvm.Value, Value] | None = None  # the stack memory of `in_memory`, and its address
        self._framed = 0  # bytes of it in use

    # ----------------------------------------------------------------------------------------- constants and memory

    def constant(self, kind: llvm.Type, number: float | Sequence[float]) -> Value:
        """A constant; one number fills all lanes of a vector, a sequence gives each its own."""
        if isinstance(kind, llvm.VectorType):
            each = list(number) if isinstance(number, Sequence) else [number] * kind.count
            return Value(self, llvm.Constant(kind, [llvm.Constant(kind.element, v) for v in each]))
        return Value(self, llvm.Constant(kind, number))

    def zero(self, kind: llvm.Type) -> Value:
        """Zero, in every lane of a vector."""
        return Value(self, llvm.Constant(kind, None if isinstance(kind, llvm.VectorType) else 0))

    def variable(self, first: Value) -> Variable:
        """A value that loops change, with its first value."""
        return Variable(self, first)

    def _pointer(self, kind: llvm.Type, address: Value) -> llvm.Value:
        return self.builder.inttoptr(address.ir, kind.as_pointer())

    def load(self, kind: llvm.Type, address: Value) -> Value:
        """The scalar or vector at an address, which needs no alignment."""
        return Value(self, self.builder.load(self._pointer(kind, address), align=1))

    def store(self, value: Value, address: Value) -> None:
        """Store a scalar or vector at an address, which needs no alignment."""
        self.builder.store(value.ir, self._pointer(value.type, address), align=1)

    def prefetch(self, address: Value, to_l1: bool = True) -> None:
        """Prefetch the cache line at an address into the L1 cache, or only into L2. It need not be readable."""
        byte = I8.as_pointer()
        function = self._declared("llvm.prefetch.p0", llvm.VoidType(), [byte, I32, I32, I32])
        read, locality, data = (llvm.Constant(I32, v) for v in (0, 3 if to_l1 else 2, 1))
        self.builder.call(function, [self._pointer(I8, address), read, locality, data])

    def table(self, numbers: Sequence[int], element: llvm.Type) -> Value:
        """The address of an array of constant integers, stored with the compiled code."""
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
        """An int64 constant."""
        return self.constant(I64, number)

    # ------------------------------------------------------------------------------------------------------ control

    @contextlib.contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1, unroll: bool = True) -> Iterator[Value]:
        """`for i in range(start, stop, step)` with an int64 index. LLVM may unroll it, if it is allowed to."""
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
        back = self.builder.branch(head)
        if not unroll:
            back.set_metadata("llvm.loop", self._not_unrolled())
        self.builder.position_at_end(after)

    def _not_unrolled(self) -> llvm.MDValue:
        """Metadata for one loop. LLVM tells loops apart by a node whose first operand is the node itself."""
        module = self.builder.module
        unique = module.add_metadata([llvm.Constant(I64, len(module.metadata))])
        node = module.add_metadata([unique, module.add_metadata(["llvm.loop.unroll.disable"])])
        node.operands = (node, *node.operands[1:])
        return node

    def _declared(self, name: str, returns: llvm.Type, parameters: Sequence[llvm.Type]) -> llvm.Function:
        """An LLVM intrinsic or C function, declared in this module."""
        existing = self.builder.module.globals.get(name)
        return existing or llvm.Function(self.builder.module, llvm.FunctionType(returns, parameters), name)

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
        """The lanes of `a` followed by `b` at constant indices."""
        second = b.ir if b is not None else llvm.Constant(a.type, llvm.Undefined)
        mask = llvm.Constant(vector(len(lanes), I32), [llvm.Constant(I32, i) for i in lanes])
        return Value(self, self.builder.shuffle_vector(a.ir, second, mask))

    def join(self, a: Value, b: Value) -> Value:
        """The lanes of `a`, then those of `b`."""
        return self.shuffle(a, b, range(a.lanes + b.lanes))

    def part(self, a: Value, first: int, lanes: int) -> Value:
        """`lanes` neighbouring lanes of a vector, from lane `first`."""
        return self.shuffle(a, None, range(first, first + lanes))

    def insert(self, a: Value, index: int, value: Value) -> Value:
        """The vector with one lane replaced."""
        return Value(self, self.builder.insert_element(a.ir, value.ir, llvm.Constant(I32, index)))

    def _fold(self, v: Value, combine: Callable[[Value, Value], Value]) -> Value:
        while v.lanes > 1:
            half = v.lanes // 2
            low, high = self.part(v, 0, half), self.part(v, half, half)
            v = combine(low, high)
        return v.lane(0)

    def sum(self, v: Value) -> Value:
        """Sum of the lanes: the upper half is added to the lower until one lane is left."""
        return self._fold(v, lambda a, b: a + b)

    def sum4(self, a: Value, b: Value, c: Value, d: Value) -> Value:
        """The sums of four 16-lane vectors as one 4-lane vector, in fewer instructions than four `sum`s."""
        return self.sums_of_halves(self._fold_two(a, b, 8), self._fold_two(c, d, 8))

    def sums_of_halves(self, x: Value, y: Value) -> Value:
        """The sums of the halves of two 16-lane vectors, x's first, as one 4-lane vector; `sum4` begins with
        a = lanes 0 to 7 + lanes 8 to 15."""
        v = self._fold_two(x, y, 4)  # four lanes each, in order
        v = v + self.shuffle(v, None, [i ^ 1 for i in range(16)])
        v = v + self.shuffle(v, None, [i ^ 2 for i in range(16)])
        return self.shuffle(v, None, [0, 4, 8, 12])

    def _fold_two(self, x: Value, y: Value, run: int) -> Value:
        """In every 2 * run lanes, add the second run to the first; the sums of x, then of y."""
        first = [i for i in range(32) if i // run % 2 == 0]
        return self.shuffle(x, y, first) + self.shuffle(x, y, [i + run for i in first])

    def largest(self, v: Value) -> Value:
        """Largest lane of a float vector."""
        return self._fold(v, self.max)

    def smallest(self, v: Value) -> Value:
        """Smallest lane of a float vector."""
        return self._fold(v, self.min)

    def lookup(self, table: Sequence[int], index: Value) -> Value:
        """`table[index]` for a table of bytes and a vector of 16 or 32 byte indices.

        A table of 16 takes indices 0..15. Tables of 32 and 64 take any index, modulo their length.
        """
        lanes = index.lanes
        table = [wrapped(byte, 8) for byte in table]
        if len(table) > 16:
            return self._long_lookup(table, index)
        names = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b"}
        if self.isa != "generic":
            return self.call(names[lanes], index.type, self.constant(index.type, table * (lanes // 16)), index)
        value = self.constant(index.type, table[0])
        for code in range(1, 16):  # compare and select, as not every CPU has a byte shuffle
            matches = self.builder.icmp_unsigned("==", index.ir, self.constant(index.type, code).ir)
            value = Value(self, self.builder.select(matches, self.constant(index.type, table[code]).ir, value.ir))
        return value

    def _long_lookup(self, table: list[int], index: Value) -> Value:
        """Look up each half of the table and select by a bit of the index; vpermb does 32 bytes at once."""
        if (
            len(table) == 32 == index.lanes
            and self.isa.startswith("avx512")
            and "avx512vbmi" in cpu_target.cpu_features()
        ):
            return self.call("llvm.x86.avx512.permvar.qi.256", index.type, self.constant(index.type, table), index)
        half = len(table) // 2
        within = index & 15 if half == 16 else index
        low, high = self.lookup(table[:half], within), self.lookup(table[half:], within)
        is_high = self.builder.icmp_unsigned("!=", (index & half).ir, self.zero(index.type).ir)
        return Value(self, self.builder.select(is_high, high.ir, low.ir))

    def where_bits(self, v: Value, masks: Sequence[int], number: int) -> Value:
        """`number` in the byte lanes where `v & mask` of the lane is not 0, and 0 elsewhere."""
        masked = v & self.constant(v.type, [wrapped(m, 8) for m in masks])
        is_set = self.builder.icmp_unsigned("!=", masked.ir, self.zero(v.type).ir)
        return Value(self, self.builder.select(is_set, self.constant(v.type, number).ir, self.zero(v.type).ir))

    def integer_of(self, v: Value, mask: int) -> Value:
        """An integer with a bit for each lane, lane 0 the lowest: 1 where `v & mask` is not 0."""
        is_set = self.builder.icmp_unsigned("!=", (v & mask).ir, self.zero(v.type).ir)
        return Value(self, self.builder.bitcast(is_set, llvm.IntType(v.lanes)))

    def between(self, v: Value, first: Value, last: Value) -> Value:
        """A mask for `choose`: first <= v < last, of signed integers."""
        low, high = (self.builder.icmp_signed(op, v.ir, b.ir) for op, b in ((">=", first), ("<", last)))
        return Value(self, self.builder.and_(low, high))

    def choose(self, mask: Value, a: Value, b: Value) -> Value:
        """Lanes of `a` where the mask is 1, of `b` elsewhere."""
        return Value(self, self.builder.select(mask.ir, a.ir, b.ir))

    def bits(self, v: Value) -> Value:
        """A mask for `choose`: the bits of an integer, lowest first."""
        return v.view(vector(v.type.width, llvm.IntType(1)))

    def any_bits(self, v: Value, masks: Sequence[int]) -> Value:
        """A mask for `choose`: `v & mask` of the lane is not 0."""
        masked = v & self.constant(v.type, [wrapped(m, v.type.element.width) for m in masks])
        return Value(self, self.builder.icmp_unsigned("!=", masked.ir, self.zero(v.type).ir))

    def less(self, a: Value, b: Value) -> Value:
        """A mask for `choose`: a < b, of signed integers or floats; 0 where one is NaN."""
        compare = self.builder.fcmp_ordered if element_of(a.type) == F32 else self.builder.icmp_signed
        return Value(self, compare("<", a.ir, b.ir))

    def below(self, v: Value, bound: int) -> Value:
        """A mask for `choose`: v < bound, of unsigned integers."""
        return Value(self, self.builder.icmp_unsigned("<", v.ir, v._operand(bound)))

    def multiply_high(self, a: Value, b: Value) -> Value:
        """Upper halves of the products of unsigned 16-bit integers."""
        return ((a.unsigned(I32) * b.unsigned(I32)) >> 16).narrow(I16)

    def in_memory(self, v: Value) -> Value:
        """Store a vector on the stack and return its address, to load parts of it.

        The address goes through an empty piece of assembly. Otherwise LLVM would see what the loads read and extract
        lanes instead, with two instructions each.
        """
        if self._frame is None:
            with self.builder.goto_entry_block():
                memory = self.builder.alloca(llvm.ArrayType(I8, _FRAME))
                memory.align = 32
                kind = llvm.FunctionType(I64, [I64])
                hidden = self.builder.call(
                    llvm.InlineAsm(kind, "", "=r,0", False), [self.builder.ptrtoint(memory, I64)]
                )
            self._frame = memory, Value(self, hidden)
        memory, address = self._frame
        width = getattr(element_of(v.type), "width", 32)  # llvmlite's float type has no width
        first, self._framed = self._framed, self._framed + -(-v.lanes * width // 256) * 32
        assert self._framed <= _FRAME, "too many vectors in memory"
        target = self.builder.gep(memory, [llvm.Constant(I32, 0), llvm.Constant(I32, first)])
        self.builder.store(v.ir, self.builder.bitcast(target, v.type.as_pointer()), align=32)
        return address + first

    # ---------------------------------------------------------------------------------------------------- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c of float32, rounded once. x86 has the instruction with AVX2; other CPUs always have it."""
        if self.isa != "generic" or not _X86:
            return self.call(f"llvm.fma.{self._suffix(a.type)}", a.type, a, b, c)
        is_vector = isinstance(a.type, llvm.VectorType)
        real, bits = (vector(a.lanes, k) if is_vector else k for k in (llvm.DoubleType(), I64))
        x, y, z = (self.builder.fpext(v.ir, real) for v in (a, b, c))
        product = self.builder.fmul(x, y)  # exact
        return Value(self, self.builder.fptrunc(self._add_to_odd(product, z, bits), a.type))

    def _add_to_odd(self, x: llvm.Value, y: llvm.Value, bits: llvm.Type) -> llvm.Value:
        """x + y of doubles, rounded to odd: where it is not exact, to the neighbour with an odd last bit.

        Rounded again to float32, that is x + y rounded once (Boldo and Melquiond, Emulation of FMA and correctly
        rounded sums, 2008). Knuth's TwoSum gives the error of the sum exactly; it is NaN where the sum is not finite.
        """
        build, real, zero = (
            self.builder,
            x.type,
            llvm.Constant(x.type, None if isinstance(bits, llvm.VectorType) else 0.0),
        )
        total = build.fadd(x, y)
        y_part = build.fsub(total, x)
        error = build.fadd(build.fsub(x, build.fsub(total, y_part)), build.fsub(y, y_part))
        number = Value(self, build.bitcast(total, bits))
        is_even = build.icmp_signed("==", (number & 1).ir, self.zero(bits).ir)
        outward = build.icmp_signed("==", build.fcmp_ordered(">", error, zero), build.fcmp_ordered(">", total, zero))
        step = build.select(outward, self.constant(bits, 1).ir, self.constant(bits, -1).ir)
        moved = build.bitcast(build.add(number.ir, step), real)
        return build.select(build.and_(is_even, build.fcmp_ordered("!=", error, zero)), moved, total)

    def max(self, a: Value, b: Value) -> Value:
        """The larger of two floats; `a` where either is NaN."""
        return Value(self, self.builder.select(self.builder.fcmp_ordered("<", a.ir, b.ir), b.ir, a.ir))

    def min(self, a: Value, b: Value) -> Value:
        """The smaller of two floats; `a` where either is NaN."""
        return Value(self, self.builder.select(self.builder.fcmp_ordered(">", a.ir, b.ir), b.ir, a.ir))

    def absolute(self, a: Value) -> Value:
        """|a| of floats."""
        return self.call(f"llvm.fabs.{self._suffix(a.type)}", a.type, a)

    def nearest(self, a: Value) -> Value:
        """The nearest int32 to float32 below 2^22 in magnitude, ties to even."""
        kind = vector(a.lanes, I32) if isinstance(a.type, llvm.VectorType) else I32
        magic = 12582912.0  # 1.5 * 2^23: the addition leaves the integer in the low bits
        return (a + magic).view(kind) - 0x4B400000

    def _suffix(self, kind: llvm.Type) -> str:
        return f"v{kind.count}f32" if isinstance(kind, llvm.VectorType) else "f32"

    def exp(self, x: Value) -> Value:
        """e^x of float32 within 2 units in the last place; 0 below -87.3, e^88 above 88, NaN for NaN.

        x = k ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7; 2^k through the exponent bits. CPU
        kernels use no other exponential: the C library's results differ from system to system.
        """
        kind = x.type
        tiny = self.builder.fcmp_ordered("<", x.ir, self.constant(kind, -87.3).ir)
        r, p, power = self._exp_parts(x)
        p = self.fma(p, r, self.constant(kind, 1.0))
        return Value(self, self.builder.select(tiny, self.zero(kind).ir, (p * power).ir))

    def expm1(self, x: Value) -> Value:
        """e^x - 1 of float32 within 3 units in the last place, near 0 too; e^88 above 88, NaN for NaN.

        With x = k ln 2 + r as in `exp`: 2^k (e^r - 1) + (2^k - 1). Below -87.3 that is -1.
        """
        r, p, power = self._exp_parts(x)
        return self.fma(p * r, power, power - 1.0)

    def _exp_parts(self, x: Value) -> tuple[Value, Value, Value]:
        """r, the Taylor polynomial of (e^r - 1) / r, and 2^k: x = k ln 2 + r within -87.3 … 88, |r| <= ln 2 / 2."""
        kind = x.type
        x = self.min(self.max(x, self.constant(kind, -87.3)), self.constant(kind, 88.0))
        k = self.nearest(x * 1.4426950408889634)
        real = k.real()
        r = self.fma(real, self.constant(kind, -0.693145751953125), x)
        r = self.fma(real, self.constant(kind, -1.428606765330187e-06), r)
        p = self.constant(kind, 1 / 5040)
        for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0):
            p = self.fma(p, r, self.constant(kind, term))
        return r, p, ((k + 127) << 23).view(kind)

    # -------------------------------------------------------------------------------------------------- half floats

    def half_to_float(self, bits: Value) -> Value:
        """float32 of halves given as 16-bit integers. Without F16C by integer operations, never by a C library call."""
        is_vector = isinstance(bits.type, llvm.VectorType)
        if self.isa != "generic":
            half = vector(bits.lanes, F16) if is_vector else F16
            return Value(self, self.builder.fpext(bits.view(half).ir, vector(bits.lanes, F32) if is_vector else F32))
        kind = vector(bits.lanes, F32) if is_vector else F32
        wide = bits.unsigned(I32)
        sign = (wide & 0x8000) << 16
        # Move exponent and mantissa into place; the product re-biases the exponent and normalizes subnormals.
        small = ((wide & 0x7FFF) << 13).view(kind) * 2.0**112
        special = self.builder.icmp_unsigned(">=", (wide & 0x7FFF).ir, self.constant(wide.type, 0x7C00).ir)
        infinite = ((wide & 0x7FFF) << 13) | 0x7F800000
        magnitude = self.builder.select(special, infinite.ir, small.view(wide.type).ir)
        return (Value(self, magnitude) | sign).view(kind)

    def float_to_half(self, x: Value) -> Value:
        """Bits of the halves nearest to a float32 vector, ties to even; 65520 and more becomes Inf."""
        bits = vector(x.lanes, I16)
        if self.isa != "generic":
            return Value(self, self.builder.fptrunc(x.ir, vector(x.lanes, F16))).view(bits)
        wide = x.view(vector(x.lanes, I32))
        sign = (wide >> 16) & 0x8000
        wide = wide & 0x7FFFFFFF
        # Adding 0.5 rounds subnormal halves to multiples of 2^-24; normal halves are rounded on their bits.
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
        """total[i] + sum over j < 4 of a[4i+j] * b[4i+j]: a unsigned bytes up to `largest`, b signed bytes; int32.

        One instruction, vpdpbusd, with VNNI. vpmaddubsw adds two products in 16 bits, which cannot overflow up to
        `largest` = 127; above that the bytes are widened first.
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
        """int16 sums of neighbouring products of bytes, `a` unsigned and `b` signed (vpmaddubsw).

        The caller must keep the sums within int16: overflow differs between CPUs.
        """
        names = {16: "llvm.x86.avx2.pmadd.ub.sw", 32: "llvm.x86.avx512.pmaddubs.w.512"}
        if product := self._by_instruction(names, vector(a.lanes // 2, I16), a, b):
            return product
        halves = vector(a.lanes // 2, I16)
        a, b = a.view(halves), b.view(halves)
        return (a & 0xFF) * (b << 8).signed_shift(8) + (a >> 8) * b.signed_shift(8)

    def signed_pairs(self, a: Value, b: Value) -> Value:
        """int16 sums of neighbouring products of signed bytes, `b` from -127 on (vpabsb, vpsignb, vpmaddubsw)."""
        names = {16: "llvm.x86.ssse3.psign.b.128", 32: "llvm.x86.avx2.psign.b"}
        if self.isa != "generic" and (with_sign_of_a := self._by_instruction(names, a.type, b, a)):
            is_negative = self.builder.icmp_signed("<", a.ir, self.zero(a.type).ir)
            magnitude = Value(self, self.builder.select(is_negative, (a * -1).ir, a.ir))
            return self.byte_pairs(magnitude, with_sign_of_a)
        halves = vector(a.lanes // 2, I16)
        a, b = a.view(halves), b.view(halves)
        return (a << 8).signed_shift(8) * (b << 8).signed_shift(8) + a.signed_shift(8) * b.signed_shift(8)

    def pairs(self, v: Value) -> Value:
        """int32 sums of neighbouring int16."""
        return self.multiply_pairs(v, self.constant(v.type, 1))

    def multiply_pairs(self, a: Value, b: Value) -> Value:
        """int32 sums of neighbouring products of signed int16 (pmaddwd)."""
        names = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
        wide = vector(a.lanes // 2, I32)
        if product := self._by_instruction(names, wide, a, b):
            return product
        a, b = a.view(wide), b.view(wide)
        low = (a << 16).signed_shift(16) * (b << 16).signed_shift(16)
        return low + a.signed_shift(16) * b.signed_shift(16)

    def _by_instruction(self, names: dict[int, str], kind: llvm.VectorType, a: Value, b: Value) -> Value | None:
        """One instruction, or the widest that the CPU has on each half. `names`: by the lanes of the result."""
        bits = (512 if self.isa.startswith("avx512") else 256 if self.isa == "avx2" else 128) if _X86 else 0
        widths = [lanes for lanes in names if lanes <= kind.count and lanes * kind.element.width <= bits]
        if not widths:
            return None
        if max(widths) == kind.count:
            return self.call(names[kind.count], kind, a, b)
        half, kind = a.lanes // 2, vector(kind.count // 2, kind.element)
        parts = (self._by_instruction(names, kind, self.part(a, i, half), self.part(b, i, half)) for i in (0, half))
        low, high = parts
        return None if low is None or high is None else self.shuffle(low, high, range(2 * kind.count))

    # ------------------------------------------------------------------------------------------------------- threads

    def atomic_load(self, address: Value) -> Value:
        """The int64 at an address, with acquire order."""
        pointer = self._pointer(I64, address)
        return Value(self, self.builder.load_atomic(pointer, "acquire", 8))

    def atomic_store(self, value: Value, address: Value) -> None:
        """Store an int64 at an address, with release order."""
        self.builder.store_atomic(value.ir, self._pointer(I64, address), "release", 8)

    def atomic_add(self, value: Value, address: Value) -> Value:
        """Add to the int64 at an address; returns the value before."""
        return Value(self, self.builder.atomic_rmw("add", self._pointer(I64, address), value.ir, "acq_rel"))

    def pause(self) -> None:
        """The CPU's hint for spin loops (x86 `pause`); nothing on other CPUs."""
        if _X86:
            self.builder.call(self._declared("llvm.x86.sse2.pause", llvm.VoidType(), []), [])

    def call_address(self, address: Value, *args: Value) -> None:
        """Call the C function `void(int64, ...)` at an address."""
        self._call(llvm.VoidType(), address, *args)

    def call_address_int64(self, address: Value, *args: Value) -> Value:
        """Call the C function `int64(int64, ...)` at an address; returns its result."""
        return Value(self, self._call(I64, address, *args))

    def _call(self, returns: llvm.Type, address: Value, *args: Value) -> llvm.Value:
        kind = llvm.FunctionType(returns, [I64] * len(args))
        return self.builder.call(self._pointer(kind, address), [a.ir for a in args])
