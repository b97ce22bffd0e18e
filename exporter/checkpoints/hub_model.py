"""What is known of a hub's model before it is looked for, and the sentences that its errors share."""

from __future__ import annotations

import re
from dataclasses import dataclass

# org/name; a path to a GGUF file may look like one.
REPO_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}(?<!\.gguf)", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A repository, and what someone must know to get it."""

    repo_id: str
    licence: str
    gated: bool = False
    shapes_known: bool = False  # then it can be tried without its weights
    flag: str = "--checkpoint"  # which names files that someone has already

    @property
    def page(self) -> str:
        """Where its licence is read and accepted."""
        return f"https://huggingface.co/{self.repo_id}"


def gated(model: HubModel) -> str:
    """What to do about a licence that was not accepted."""
    return (
        f"{model.repo_id} is gated. Accept its licence ({model.licence}) at {model.page}, run `hf auth login` with a token of "
        f"that account (or set HF_TOKEN), then run this again. Files that you have already: {model.flag} PATH."
    )


def short(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
