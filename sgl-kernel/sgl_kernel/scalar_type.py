"""Descriptions of the sub-byte and byte formats that quantised weights are stored in.

sglang's quantisation code names formats by these objects when it is imported and reads their width,
range and bias; only its CUDA kernels do arithmetic with them. `id` packs a format into the integer
that those kernels take, so that ids stay comparable with the compiled package's.
"""

from dataclasses import dataclass
from enum import IntEnum


class NanRepr(IntEnum):
    """How a floating-point format encodes NaN."""

    NONE = 0
    IEEE_754 = 1
    EXTD_RANGE_MAX_MIN = 2


# Bits of each field in `ScalarType.id`, lowest first.
_ID_WIDTHS = {
    "exponent": 8,
    "mantissa": 8,
    "signed": 1,
    "bias": 32,
    "finite_values_only": 1,
    "nan_repr": 8,
}


@dataclass(frozen=True)
class ScalarType:
    """A number format: an integer when `exponent` is 0, a floating-point number otherwise.

    exponent, mantissa: bits, without the sign bit; bias: what is added to a value to store it.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_values_only: bool = False
    nan_repr: NanRepr = NanRepr.IEEE_754

    @classmethod
    def int_(cls, bits: int, bias: int = 0) -> "ScalarType":
        """A signed integer of `bits` bits in all."""
        return cls(0, bits - 1, True, bias)

    @classmethod
    def uint(cls, bits: int, bias: int = 0) -> "ScalarType":
        """An unsigned integer of `bits` bits."""
        return cls(0, bits, False, bias)

    @classmethod
    def float_(
        cls,
        exponent: int,
        mantissa: int,
        finite_values_only: bool = False,
        nan_repr: NanRepr = NanRepr.IEEE_754,
    ) -> "ScalarType":
        """A signed floating-point format; the defaults are IEEE 754's."""
        return cls(exponent, mantissa, True, 0, finite_values_only, nan_repr)

    @property
    def size_bits(self) -> int:
        return self.exponent + self.mantissa + int(self.signed)

    @property
    def id(self) -> int:
        packed = offset = 0
        for field, width in _ID_WIDTHS.items():
            packed |= (int(getattr(self, field)) & (1 << width) - 1) << offset
            offset += width
        return packed

    def is_integer(self) -> bool:
        return self.exponent == 0

    def is_floating_point(self) -> bool:
        return self.exponent > 0

    def is_signed(self) -> bool:
        return self.signed

    def has_bias(self) -> bool:
        return self.bias != 0

    def max(self) -> int | float:
        """Largest finite value, the bias taken off."""
        if self.is_integer():
            return (1 << self.mantissa) - 1 - self.bias
        top_exponent, top_mantissa = (1 << self.exponent) - 1, (1 << self.mantissa) - 1
        if self.nan_repr is NanRepr.IEEE_754 and not self.finite_values_only:
            top_exponent -= 1
        elif self.nan_repr is NanRepr.EXTD_RANGE_MAX_MIN:
            top_mantissa -= 1
        exponent_bias = (1 << self.exponent - 1) - 1
        fraction = 1 + top_mantissa / (1 << self.mantissa)
        return fraction * 2.0 ** (top_exponent - exponent_bias)

    def min(self) -> int | float:
        """Smallest finite value, the bias taken off."""
        if self.is_floating_point():
            return -self.max()
        return (-(1 << self.mantissa) if self.signed else 0) - self.bias


class scalar_types:
    """The formats that sglang names."""

    int4 = ScalarType.int_(4)
    int8 = ScalarType.int_(8)
    uint4 = ScalarType.uint(4)
    uint8 = ScalarType.uint(8)
    # GPTQ: unsigned storage of signed values.
    uint4b8 = ScalarType.uint(4, bias=8)
    uint8b128 = ScalarType.uint(8, bias=128)
    float8_e4m3fn = ScalarType.float_(4, 3, True, NanRepr.EXTD_RANGE_MAX_MIN)
    float8_e5m2 = ScalarType.float_(5, 2)
    float4_e2m1f = ScalarType.float_(2, 1, True, NanRepr.NONE)
    float16 = ScalarType.float_(5, 10)
    bfloat16 = ScalarType.float_(8, 7)
