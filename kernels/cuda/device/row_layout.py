"""How rows stand in shared memory (padded shared memory), and how their codes fall to the lanes.

    shared memory, one row      ┌ pad ┬ header ┬ codes, 16 bytes a chunk ┬ pad ┐
                                0            prefix                         stride

ldmatrix reads 8 rows x 16 bytes at once, without bank conflicts if rows are an odd number of
16-byte units apart. A 256-byte row gets a 17th unit. Rows of twice an odd number of units (96, 160,
224, 288, 544 bytes) stay: padding costs more than their conflicts.

A row whose length is no multiple of 16, such as 68 bytes, is *direct* or realigned. Dense rows of a
single group whose chunks pair up are direct, up to 256 elements, if K and V both are: lanes load
words as they landed (may_be_direct, token_steps), without a pad. Others are realigned: 12 bytes
before the header let codes start at a unit. Until then dense rows stand as in global memory, others
as 16-byte windows that cover them:

    landing, not dense    ┌ before ┬ header ┬ codes ┬ after ┐    with bytes of the rows around it
                          0      shift                16 * windows

INT3's planes become words of nibbles on the way (codes.py): of 64 elements the even ones in a
chunk, the odd ones in the next.

Kernels that write rows, or turn them into elements, walk over rows (RowSpec). A row belongs to
`lanes` lanes of a warp, 16 elements each; some lanes may have none. Shared memory of a warp:

    ring    stages of elements or of rows, by asynchronous copies: how far a warp reads ahead
    out     rows or elements as they will be written, so that stores are as wide as rows allow

K and V of unlike rows have the lanes of the longer ones.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from kvquant.errors import UnsupportedError
from kvquant.rows.format import RowFormat

UNIT = 16  # bytes
WORD = 4
ELEMENTS = 16  # of a row that a lane has
STAGES = 4  # of a warp's ring of rows
WIDEST_DIRECT = 256  # elements of a row that is read where it landed: wider ones would spill
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element
# of a block that multiplies rows by a matrix (products.py): as many rows of a group as warps, and
# the columns of the matrix that it has at a time
PRODUCT_WARPS = PRODUCT_ROWS = 8
PRODUCT_COLUMNS = 128


def divisor(number: int) -> tuple[int, int]:
    """(factor, shift): n // number is n * factor >> shift for 0 <= n < 2**31 (Granlund 1994)."""
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def refuse_latents(*formats: RowFormat) -> None:
    """Raise unless these are rows of heads: only the append kernel takes parts of latent rows."""
    for fmt in formats:
        if not fmt.is_of_heads:
            raise UnsupportedError(
                f"{fmt} rows of {fmt.head_dim} elements, of latent rows, have no CUDA kernel here: "
                "use the CPU, or backend='reference'"
            )


def lanes_of(*formats: RowFormat) -> int:
    """Lanes that rows of these formats belong to; of the shorter rows some lanes have no part."""
    check_codec(*formats)
    most = max(fmt.head_dim for fmt in formats)
    return 1 << (most // ELEMENTS - 1).bit_length()


def unit_of(fmt: RowFormat) -> int:
    """Bytes of the widest access that every row of a format allows, and its codes too."""
    header = fmt.header_bytes & -fmt.header_bytes or UNIT
    return min(UNIT, fmt.alignment, header)


def prefix_of(fmt: RowFormat) -> int:
    """Bytes before the codes of a row in shared memory: the header, which ends at a unit."""
    return -(-fmt.header_bytes // UNIT) * UNIT


def staged_bytes(fmt: RowFormat) -> int:
    """Bytes from a row in shared memory to the next."""
    return prefix_of(fmt) + -(-fmt.code_bytes // UNIT) * UNIT


def check_codec(*formats: RowFormat) -> None:
    """Raise UnsupportedError unless kernels have code for these codecs, and rows lie at words."""
    for fmt in formats:
        mmas_of(fmt)
        operand_of(fmt)
        if fmt.alignment % WORD:
            raise UnsupportedError(
                f"{fmt} rows of head_dim {fmt.head_dim} are not served here: they take "
                f"{fmt.row_bytes} bytes, and rows must be a multiple of {WORD} long. Use another "
                "format"
            )


def operand_of(fmt: RowFormat) -> str:
    """What MMAs multiply, "bf16" or "fp16": elements as they are, codes as fp16 (codes.py)."""
    return fmt.pick(bf16="bf16", fp16="fp16", integers="fp16", e4m3="fp16")


def mmas_of(fmt: RowFormat) -> int:
    """MMAs that a word of codes takes, or two words of elements: 16 elements of four lanes each."""
    return fmt.pick(quarters=4, planes=2, nibbles=2, bytes=1, elements=1)


def codes_per_word(fmt: RowFormat) -> int:
    """Codes of a word, a whole number of bits apart; 0 for elements; INT3 comes as nibbles."""
    return fmt.pick(quarters=16, planes=8, nibbles=8, bytes=4, elements=0)


def strands_of(fmt: RowFormat) -> int:
    """Words among which codes alternate: INT3 makes words of the even and of the odd elements."""
    return fmt.pick(quarters=1, planes=2, nibbles=1, bytes=1, elements=1)


def bits_apart(fmt: RowFormat) -> int:
    """Bits from a code of a word to the next."""
    return 32 // codes_per_word(fmt)


def words_of_codes(fmt: RowFormat) -> int:
    """Words that hold the codes of a lane's 16 elements."""
    return ELEMENTS // codes_per_word(fmt)


def place_of_code(fmt: RowFormat, i: int) -> tuple[int, int]:
    """The word, and the bit in it, at which the code of a lane's i-th element stands."""
    strands = strands_of(fmt)
    word, place = divmod(i // strands, codes_per_word(fmt))
    return strands * word + i % strands, place * bits_apart(fmt)


def factor_of(fmt: RowFormat) -> float:
    """By what the numbers in the MMAs are too small: codes stand there as subnormals."""
    return fmt.pick(integers=2.0**24, e4m3=2.0**8, bf16=1.0, fp16=1.0)


def product_bytes(head_dim: int, groups: int = 1) -> int:
    """Shared memory of a block that multiplies rows by a matrix, groups of PRODUCT_ROWS."""
    return 4 * PRODUCT_ROWS * (groups * head_dim + PRODUCT_WARPS * PRODUCT_COLUMNS)


class RowSpec:
    """How a spec shares rows out."""

    warps: int

    @property
    @abstractmethod
    def lanes(self) -> int:
        """Lanes of a row."""

    @property
    @abstractmethod
    def warp_bytes(self) -> int:
        """Shared memory of a warp."""

    @property
    def rows(self) -> int:
        return 32 // self.lanes

    @property
    def tokens(self) -> int:
        return self.warps * self.rows

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.warp_bytes


@dataclass(frozen=True)
class StagedRow:
    """The facts of a format in shared memory, for constants of a kernel.

    dense: whether rows have no gaps in global memory.
    direct: whether lanes read rows by words where they landed.
    """

    fmt: RowFormat
    dense: bool = True
    direct: bool = False

    def __post_init__(self) -> None:
        fmt, span = self.fmt, self.span
        check_codec(fmt)
        if fmt.groups > 1 and fmt.group_size % span and span % fmt.group_size:
            raise UnsupportedError(
                f"{fmt} with head_dim {fmt.head_dim} has no CUDA kernel: its groups of "
                f"{fmt.group_size} do not line up with the {span} elements in 16 bytes. Use "
                "other groups, or backend='reference'"
            )

    @property
    def span(self) -> int:
        """Elements in a chunk of 16 bytes; for 16-bit rows in the two chunks of an MMA."""
        return 16 * self.mmas

    @property
    def prefix(self) -> int:
        """Bytes before the codes: the header and, unless rows are direct, the pad that aligns the
        codes."""
        return max(0 if self.fmt.is_exact or self.direct else UNIT, self.fmt.header_bytes)

    @property
    def chunks(self) -> int:
        """Units of codes, the last one perhaps not full; the last ones where codes alternate."""
        if self.fmt.is_exact:
            return self.fmt.code_bytes // UNIT
        return self.strands * -(-self.fmt.head_dim // (self.strands * self.span))

    @property
    def strands(self) -> int:
        """Chunks among which the codes of their elements alternate."""
        return strands_of(self.fmt)

    @property
    def group_span(self) -> int:
        """Elements of a group; of the only one with those that the last chunk is filled with."""
        return self.fmt.group_size if self.fmt.groups > 1 else self.chunks * self.span

    @property
    def stride(self) -> int:
        """Bytes from a row to the next: a number of units that is no multiple of 4; an odd number
        of words of direct rows."""
        if self.direct:
            return self.fmt.row_bytes
        return self._spread(self.prefix // UNIT + self.chunks, 4)

    @property
    def realigned(self) -> bool:
        """Whether rows are moved in shared memory before ldmatrix reads them."""
        is_off = bool(self.fmt.row_bytes % UNIT or self.fmt.header_bytes % UNIT)
        return is_off and not self.direct

    @property
    def may_be_direct(self) -> bool:
        """Whether lanes can read rows by words where they landed. Such rows have an odd number of
        words, and chunks in pairs: a word of V holds units of two."""
        fmt, pair = self.fmt, 2 * self.strands * self.span
        fits = fmt.head_dim % pair == 0 and fmt.head_dim <= WIDEST_DIRECT
        return self.dense and self.realigned and fmt.groups == 1 and fits

    @property
    def token_steps(self) -> tuple[int, int]:
        """Tokens from a row of an 8x8 matrix to the next, and from a matrix to the next. Of direct
        rows every fourth: with an odd number of words a row the lanes of a load share no bank."""
        return (4, 1) if self.direct else (1, 8)

    @property
    def half(self) -> int:
        """Bytes from a row of an MMA's 16 to that of the tile's other MMA."""
        return 2 * self.token_steps[1] * self.stride

    @property
    def windows(self) -> int:
        """Asynchronous copies of 16 bytes that cover a row, wherever it starts."""
        return -(-(self.fmt.row_bytes + UNIT - self.alignment) // UNIT)

    @property
    def landing(self) -> int:
        """Bytes from a row to the next as they are copied."""
        if not self.realigned:
            return self.stride
        return self.fmt.row_bytes if self.dense else self._spread(self.windows, 2)

    @property
    def alignment(self) -> int:
        """What rows must be aligned to in global memory."""
        return min(self.fmt.alignment, UNIT)

    @property
    def header_units(self) -> int:
        """Units that hold the header: 4 groups each; 0 for 16-bit rows."""
        return -(-self.prefix // UNIT)

    def header_word(self, group: int) -> int:
        """The word of a group's scale and shift, counted from the first unit of the header."""
        return group + (self.prefix - self.fmt.header_bytes) // 4

    def _spread(self, units: int, even: int) -> int:
        """Bytes of so many units, and of one more against bank conflicts."""
        return UNIT * (units + (units % even == 0))

    @property
    def parts(self) -> int:
        """Groups that share a chunk; their products are kept apart by zeros."""
        if self.fmt.groups == 1 or self.fmt.group_size % self.span == 0:
            return 1
        return self.span // self.fmt.group_size

    @property
    def mmas(self) -> int:
        return mmas_of(self.fmt)

    @property
    def sums(self) -> int:
        """Accumulators of a lane for the output of 8 heads."""
        return 2 * self.chunks if self.fmt.is_exact else 4 * self.chunks * self.mmas
