"""Which problems were solved, packed into text."""

from collections.abc import Sequence


def pack(solved: Sequence[bool]) -> str:
    """Pack one bit per problem into hexadecimal digits."""
    bits = "".join("1" if value else "0" for value in solved)
    return f"{int('1' + bits, 2):x}"  # the leading 1 preserves leading zeros


def unpack(text: str) -> list[bool]:
    """Undo `pack`."""
    return [bit == "1" for bit in f"{int(text, 16):b}"[1:]]
