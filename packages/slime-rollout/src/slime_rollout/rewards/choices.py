"""The rule ``gpqa``: which letter of several choices a response names, and which one is right."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime_rollout.rewards.answers import after_thought, last_boxed

METADATA_KEYS = ("choices", "correct_letter", "valid_letters", "correct_answer", "answer_text")
"""Entries of a row's metadata that :func:`multiple_choice` looks at."""

_LETTERS = string.ascii_uppercase
_FEWEST = 4  # letters that may be chosen where nothing says how many there are
# A letter before a lower-case word is an article, a pronoun or part of a name ("vitamin C deficiency"), unless the word
# says why it is chosen, or that it is right.
_REASON = r"because|since|as"
_RIGHT = rf"(?:{_REASON}|is|was|must|would|seems|looks|fits)\b(?![ ](?:not|never|wrong|incorrect|false)\b)"
_MARK = r"(?:answer|choice|option)(?:[ ]is)?\s{0,3}:?\s{0,3}"
_SAID_LETTER = re.compile(rf"{_MARK}[*$]{{0,2}}\(?([A-Z])\b(?![ ](?!(?:{_REASON}|or|and)\b)[a-z])")
# In lower case "a" is an article before any word, and other letters may be the first of an abbreviation.
_SAID_LOWER = re.compile(rf"{_MARK}[*$]{{0,2}}([a-z])\b(?!['’.][a-z]|[ ](?!(?:{_REASON})\b)\w)")
_CORRECT_LOWER = re.compile(r"\b([b-z]) is (?:the )?correct\b")
_LONE_LETTER = re.compile(rf"\b([A-Z])\b(?!['’]|[ ](?!{_RIGHT})[a-z])")


def multiple_choice(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """1 if the response chooses the right letter; without a letter, if it holds the right choice's text (GPQA).

    The right letter is ``metadata["correct_letter"]``, or else the label: a letter, the text of one of
    ``metadata["choices"]`` (a list, a mapping of letters to texts, or ARC's ``label`` and ``text``), or an index from
    0. Letters are those from A on, or ``metadata["valid_letters"]``. The chosen letter is the last in a box, or after
    "answer is", "option" and the like, or else the last that stands alone; it is looked for after ``</think>``. Texts
    are those of the right choice, ``correct_answer``, ``answer_text`` and the label; case and punctuation aside.
    """
    letters = choice_letters(metadata)
    choices = _choices(metadata.get("choices"), letters)
    right = correct_letter(label, metadata.get("correct_letter"), choices, letters)
    answer = after_thought(response) or response
    count = len(choices) or len(metadata.get("valid_letters") or ()) or max(_FEWEST, _place(right, letters) + 1)
    chosen = _chosen_letter(answer, letters[:count])
    if chosen is not None and right is not None:
        return float(chosen == right)
    words = f" {_words(answer)} "
    return float(any(f" {text} " in words for text in _right_texts(label, right, choices, letters, metadata)))


def choice_letters(metadata: Mapping[str, Any]) -> str:
    """The letters that choices may have, in their order."""
    return "".join(str(letter).strip("() .").upper()[:1] for letter in metadata.get("valid_letters") or ()) or _LETTERS


def correct_letter(label: str, named: str | None, choices: Sequence[str], letters: str = _LETTERS) -> str | None:
    """The letter of the right choice; ``None`` if it is unknown."""
    label = (named or label).strip()
    letter = label.strip("()").upper()
    if len(letter) == 1 and letter in letters:
        return letter
    for same in (str.strip, lambda text: text.strip().casefold(), _words):
        texts = [same(choice) for choice in choices]
        if same(label) and same(label) in texts:
            return letters[texts.index(same(label))]
    if label.isascii() and label.isdigit() and len(label) < 3 and int(label) < len(letters):
        return letters[int(label)]
    return None


def index_metadata(label: Any, metadata: Mapping[str, Any]) -> dict[str, str]:
    """The letter of the right choice, for the metadata of a row whose label is the number of a choice.

    The label's text may be that of another choice. Nothing where no choices are given, or the letter is.
    """
    if isinstance(label, bool) or not (isinstance(label, int) or (isinstance(label, float) and label.is_integer())):
        return {}
    if metadata.get("correct_letter") or not (metadata.get("choices") or metadata.get("valid_letters")):
        return {}
    letters = choice_letters(metadata)
    letters = letters[: len(_choices(metadata.get("choices"), letters)) or len(letters)]
    return {"correct_letter": letters[int(label)]} if 0 <= label < len(letters) else {}


def choice_problem(label: str, metadata: Mapping[str, Any]) -> str | None:
    """Why a label cannot say which choice is right, as the end of a message; ``None`` if it can."""
    choices = _choices(metadata.get("choices"), choice_letters(metadata))
    if not choices or not label.strip().removesuffix(".0").isdigit():
        return None
    if correct_letter(label, metadata.get("correct_letter"), choices, choice_letters(metadata)[: len(choices)]):
        return None
    return f"the label {label} is neither an index from 0 to {len(choices) - 1} nor the text of a choice"


def _choices(given: Any, letters: str) -> list[str]:
    """The choices' texts, in the order of their letters."""
    if not isinstance(given, Mapping):
        return [] if isinstance(given, str) else [str(choice) for choice in given or ()]
    if given.keys() == {"label", "text"}:
        given = dict(zip(given["label"], given["text"], strict=False))
    by_letter = {str(key).strip("() .").upper(): str(text) for key, text in given.items()}
    if not all(len(key) == 1 and key in letters for key in by_letter):
        return list(by_letter.values())
    return [by_letter.get(letter, "") for letter in letters[: max(map(letters.index, by_letter), default=-1) + 1]]


def _place(letter: str | None, letters: str) -> int:
    return letters.index(letter) if letter is not None else -1


def _right_texts(
    label: str, right: str | None, choices: Sequence[str], letters: str, metadata: Mapping[str, Any]
) -> Iterator[str]:
    """The texts that a response without a letter may hold, as words."""
    place = _place(right, letters)
    texts = [choices[place]] if 0 <= place < len(choices) else []
    texts += [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    stripped = label.strip()
    if not (len(stripped) == 1 and stripped.upper() in letters) and not (choices and stripped.isdigit()):
        texts.append(label)
    yield from filter(None, map(_words, texts))


def _words(text: str) -> str:
    """Letters and digits in lower case, with one space for whatever is between."""
    return " ".join(re.sub(r"[\W_]+", " ", text.casefold()).split())


def _chosen_letter(answer: str, letters: str) -> str | None:
    boxed = last_boxed(answer)
    if boxed is not None:
        inner = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", boxed).strip(" ().")
        if len(inner) == 1 and inner.upper() in letters:
            return inner.upper()
    # The words that say so, in lower case.
    answer = re.sub(r"\b(?:answer|choice|option|is)\b", lambda match: match[0].lower(), answer, flags=re.IGNORECASE)
    for patterns in ((_SAID_LETTER, _SAID_LOWER), (_LONE_LETTER,), (_CORRECT_LOWER,)):
        found = [match for pattern in patterns for match in pattern.finditer(answer) if match[1].upper() in letters]
        if found:
            return max(found, key=lambda match: match.start(1))[1].upper()
    return None
