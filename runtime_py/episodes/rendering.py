"""The text of a history and its token stream.

Every line is encoded on its own: tokens never straddle two lines, so appending an utterance leaves all earlier tokens
as they are, and a line has the same tokens in the history, in a prompt and when it is read again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from runtime_py.episodes.history import Utterance, check_session_order
from runtime_py.errors import UsageError

Encode = Callable[[str], list[int]]


def header_line(speakers: Sequence[str]) -> str:
    """First line of a history, naming the speakers."""
    if not speakers:
        return "A conversation.\n"
    if len(speakers) == 1:
        return f"A conversation with {speakers[0]}.\n"
    return f"A conversation between {', '.join(speakers[:-1])} and {speakers[-1]}.\n"


def date_line(date: str) -> str:
    """Line that opens a session, "" when its date is unknown."""
    return f"[{date}]\n" if date else ""


def is_date_line(line: str) -> bool:
    """Whether a rendered line is a date line; an utterance's line always ends with its closing quote."""
    return line.startswith("[") and line.endswith("]\n")


def utterance_line(utterance: Utterance) -> str:
    """Line of one utterance."""
    return f'{utterance.speaker} said, "{utterance.text}"\n'


class TokenStream:
    """Token ids of a whole history: prefix, header, then per utterance its date line (where a session begins) and line.

    ``encode`` turns a line into ids of the language model and adds no special tokens. Token indices count from 0 with
    the prefix first; they are what an episode's ``src`` holds.
    """

    def __init__(
        self, prefix: Sequence[int], encode: Encode, speakers: Sequence[str], utterances: Iterable[Utterance] = ()
    ) -> None:
        self._encode = encode
        self._tokens: list[int] = [*prefix, *encode(header_line(speakers))]
        self._starts: list[int] = []
        self._session: int | None = None
        for utterance in utterances:
            self.append(utterance)

    def append(self, utterance: Utterance) -> None:
        """Add one utterance at the end. Raises ``WorkError`` when its session lies before the last one's."""
        if self._session is not None:
            check_session_order(self._session, utterance.session, len(self._starts))
        self._starts.append(len(self._tokens))
        opening = date_line(utterance.date) if utterance.session != self._session else ""
        if opening:
            self._tokens.extend(self._encode(opening))
        self._tokens.extend(self._encode(utterance_line(utterance)))
        self._session = utterance.session

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_utterances(self) -> int:
        """How many utterances the stream holds."""
        return len(self._starts)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the tokens ``[start, stop)``. Raises ``UsageError`` outside 0 to the length of the stream."""
        if not 0 <= start <= stop <= len(self._tokens):
            raise UsageError(
                f"Tokens {start} to {stop} were asked for; the history has {len(self._tokens)}. Ask for a range within it."
            )
        return self._tokens[start:stop]

    def utterance_at(self, token_index: int) -> int | None:
        """Index of the utterance a token belongs to, None in prefix and header. Raises ``UsageError`` outside."""
        if not 0 <= token_index < len(self._tokens):
            raise UsageError(f"Token {token_index} was asked for; the history has {len(self._tokens)}. Ask for one within it.")
        found = bisect_right(self._starts, token_index) - 1
        return found if found >= 0 else None

    def start_of(self, utterance_index: int) -> int:
        """Index of an utterance's first token, its date line included. Raises ``UsageError`` for an unknown one."""
        if not 0 <= utterance_index < len(self._starts):
            raise UsageError(
                f"Utterance {utterance_index} was asked for; the history has {len(self._starts)}. Ask for one within it."
            )
        return self._starts[utterance_index]
