"""Vectors of float32 for numba, at raw addresses: what the CPU kernel computes with.

Loops over numba arrays leave vectorising to LLVM, which for rows of 64 to 256 numbers spends as long on checking
whether they overlap, and on remainders, as on the numbers. These are LLVM's own vectors instead: one 512-bit register,
one of 256 bits or two of 128, as the machine has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model


def _has_512_bits() -> bool:
    try:
        return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))
    except RuntimeError:  # LLVM does not know how to ask this machine
        return False


LANES = 16 if _has_512_bits() else 8

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VECTOR, _HALVES = ir.VectorType(_F32, LANES), ir.VectorType(_I16, LANES)
_ANY_ALIGNMENT = 2  # bytes that addresses are known to be a multiple of, whatever a tensor's strides are


class _VectorType(types.Type):
    def __init__(self) -> None:
        super().__init__(f"float32x{LANES}")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)


vector, address = _VectorType(), types.int64


def _inline(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function for kernels of one that builds LLVM instructions: ``build(builder, *values)``."""

    def decorate(build: Callable[..., Any]) -> Any:
        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            built = build(builder, *values)
            return context.get_dummy_value() if result is types.void else built

        # numba reads the number of arguments from the function itself
        makers = {
            1: lambda typing, a: (result(*arguments), lower),
            2: lambda typing, a, b: (result(*arguments), lower),
            3: lambda typing, a, b, c: (result(*arguments), lower),
        }
        return intrinsic(makers[len(arguments)])

    return decorate


def _pointer(b: ir.IRBuilder, at: ir.Value, to: ir.Type) -> ir.Value:
    return b.inttoptr(at, to.as_pointer())


def _all(value: ir.Type, number: float) -> ir.Constant:
    """A vector constant of one number."""
    return ir.Constant(ir.VectorType(value, LANES), [number] * LANES)


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
    signature = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, signature, name), values, fastmath=flags)


# --- integers and addresses ------------------------------------------------------------------------------------------


@_inline(types.int64, address)
def int32(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    """The int32 at an address."""
    return b.sext(b.load(_pointer(b, at, _I32)), _I64)


@_inline(types.int64, address)
def int64(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    """The int64 at an address."""
    return b.load(_pointer(b, at, _I64))


@_inline(types.int64, address)
def take(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    """The old value of an int64 counter that threads share, which it raises by one."""
    return b.atomic_rmw("add", _pointer(b, at, _I64), _I64(1), "monotonic")


@_inline(types.void, address)
def prefetch(b: ir.IRBuilder, at: ir.Value) -> None:
    """Asks for one cache line, to be read; no address is wrong."""
    signature = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = b.module.declare_intrinsic("llvm.prefetch", [_I8.as_pointer()], signature)
    b.call(function, [_pointer(b, at, _I8), _I32(0), _I32(3), _I32(1)])


@_inline(types.voidptr, address)
def pointer(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
    """An address as a pointer."""
    return _pointer(b, at, _I8)


# --- arithmetic ------------------------------------------------------------------------------------------------------


@_inline(vector, types.float32)
def splat(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The same number in all lanes."""
    one = b.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, _I32(0))
    return b.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), _all(_I32, 0))


@_inline(vector, vector, vector)
def mul(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x * y."""
    return b.fmul(x, y)


@_inline(vector, vector, vector)
def add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x + y."""
    return b.fadd(x, y)


@_inline(vector, vector, vector)
def sub(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x - y."""
    return b.fsub(x, y)


@_inline(vector, vector, vector, vector)
def muladd(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, with one rounding where the machine has an instruction for it."""
    return _muladd(b, x, y, z)


@_inline(types.float32, vector)
def total(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Sum of the lanes, pairwise."""
    return _call(b, f"llvm.vector.reduce.fadd.v{LANES}f32", _F32, _F32(-0.0), x, flags=("reassoc",))


@intrinsic
def add_totals(typing: Any, at: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Adds the sums of eight vectors to the eight float32 at an address.

    Pairs of vectors are halved into one of both until a single one is left: fewer steps than eight separate sums take.
    """

    def lower(context: Any, b: Any, signature: Any, values: Any) -> Any:
        at, *parts = values
        piece = LANES  # neighbouring lanes that belong to one sum
        while len(parts) > 1:
            piece //= 2
            first = [lane + i for lane in range(0, 2 * LANES, 2 * piece) for i in range(piece)]
            parts = [_halve(b, x, y, first, piece) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        sums = parts[0]
        if piece == 2:
            sums = _halve(b, sums, ir.Constant(sums.type, ir.Undefined), list(range(0, LANES, 2)), 1)
        place = _pointer(b, at, sums.type)
        b.store(b.fadd(b.load(place, align=_ANY_ALIGNMENT), sums), place, align=_ANY_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(address, *[vector] * 8), lower


def _halve(b: ir.IRBuilder, x: ir.Value, y: ir.Value, first: list[int], piece: int) -> ir.Value:
    """The lanes ``first`` of x and y joined, plus those ``piece`` further on."""
    mask = ir.VectorType(_I32, len(first))
    return b.fadd(*(b.shuffle_vector(x, y, ir.Constant(mask, [i + o for i in first])) for o in (0, piece)))


@_inline(vector, vector)
def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp of numbers <= 0 (-inf too) within 2 units in the last place; 0 below -87.3, where float32 has no normal ones.

    exp(x) = 2**n exp(r), |r| <= ln 2 / 2, with the polynomial of Cephes' expf. NaN stays NaN.
    """
    low = b.fcmp_ordered("<", x, _all(_F32, -87.3))
    z = b.select(low, _all(_F32, -87.3), x)
    magic = _all(_F32, 1.5 * 2**23)  # a small float added to it leaves its nearest integer in the mantissa's low bits
    shifted = _muladd(b, z, _all(_F32, 1.4426950408889634), magic)
    minus_n = b.fsub(magic, shifted)
    r = _muladd(b, minus_n, _all(_F32, 0.693359375), z)  # ln 2 in two parts: n times the first is exact
    r = _muladd(b, minus_n, _all(_F32, -2.12194440e-4), r)
    p = _all(_F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        p = _muladd(b, p, r, _all(_F32, c))
    bits = b.shl(b.bitcast(shifted, ir.VectorType(_I32, LANES)), _all(_I32, 23))
    power = b.bitcast(b.add(bits, _all(_I32, 127 << 23)), _VECTOR)
    return b.select(low, _all(_F32, 0.0), b.fmul(p, power))


def _muladd(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return _call(b, f"llvm.fmuladd.v{LANES}f32", _VECTOR, x, y, z)


# --- numbers of any dtype --------------------------------------------------------------------------------------------


def _like(x: ir.Value, element: ir.Type) -> ir.Type:
    """``element``, or a vector of it where x is a vector."""
    return ir.VectorType(element, LANES) if isinstance(x.type, ir.VectorType) else element


def _constant(kind: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * LANES if isinstance(kind, ir.VectorType) else number)


def _same(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return x


def _from_bfloat16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    wide = _like(x, _I32)
    return b.bitcast(b.shl(b.zext(x, wide), _constant(wide, 16)), _like(x, _F32))


def _to_bfloat16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Rounded to nearest even; NaN stays one, which rounding its bits up could turn into infinity or zero."""
    wide = _like(x, _I32)
    bits = b.bitcast(x, wide)
    odd = b.and_(b.lshr(bits, _constant(wide, 16)), _constant(wide, 1))
    rounded = b.add(bits, b.add(odd, _constant(wide, 0x7FFF)))
    bits = b.select(b.fcmp_unordered("uno", x, x), _constant(wide, 0x7FC00000), rounded)
    return b.trunc(b.lshr(bits, _constant(wide, 16)), _like(x, _I16))


def _from_float16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.fpext(b.bitcast(x, _like(x, ir.HalfType())), _like(x, _F32))


def _to_float16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return b.bitcast(b.fptrunc(x, _like(x, ir.HalfType())), _like(x, _I16))


def _reader(result: Any, memory: ir.Type, decode: Callable[..., ir.Value]) -> Any:
    @_inline(result, address)
    def read(b: ir.IRBuilder, at: ir.Value) -> ir.Value:
        return decode(b, b.load(_pointer(b, at, memory), align=_ANY_ALIGNMENT))

    return read


def _writer(argument: Any, memory: ir.Type, encode: Callable[..., ir.Value]) -> Any:
    @_inline(types.void, address, argument)
    def write(b: ir.IRBuilder, at: ir.Value, x: ir.Value) -> None:
        b.store(encode(b, x), _pointer(b, at, memory), align=_ANY_ALIGNMENT)

    return write


# A vector of numbers, and one.
load, number = _reader(vector, _VECTOR, _same), _reader(types.float32, _F32, _same)
store, put = _writer(vector, _VECTOR, _same), _writer(types.float32, _F32, _same)
load_bfloat16 = _reader(vector, _HALVES, _from_bfloat16)
number_bfloat16 = _reader(types.float32, _I16, _from_bfloat16)
store_bfloat16, put_bfloat16 = _writer(vector, _HALVES, _to_bfloat16), _writer(types.float32, _I16, _to_bfloat16)
load_float16, number_float16 = _reader(vector, _HALVES, _from_float16), _reader(types.float32, _I16, _from_float16)
store_float16, put_float16 = _writer(vector, _HALVES, _to_float16), _writer(types.float32, _I16, _to_float16)
