"""The one exception that is meant for the user's eyes."""


class UserError(Exception):
    """Wrong input or settings: one line that names the file, line or key, and the remedy."""


def one_line(said: object, most: int | None = None) -> str:
    """What a library says over several lines, as part of ours; at most `most` characters of it."""
    return " ".join(str(said).split())[:most]
