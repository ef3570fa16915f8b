"""
Completions of functions: prompts, generation and the rules that judge them.

A prompt is one function, in the evaluation a held-out one, from its ``def`` to the line before its
first statement, docstring included, dedented. The text judged is prompt plus completion. When the
token limit stopped the model, the last line is dropped, as it may be incomplete. Then:

* ``clean``: the whole text is valid Python, except that it may end before an open construct is
  finished. No invalid part is cut away.
* ``cut``: some prefix of its lines is valid Python.

Both also ask for at least ``MIN_STATEMENTS`` complete statements after the prompt. Beside them, a
completion ``loops`` when it has some ``LOOP_GRAM`` tokens in a row more than ``LOOP_COUNT`` times.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import SourceFile
from .model import KvCache, Llama
from .tokenizer import BOS_ID, EOS_ID

PROMPTS = 50
PROMPTS_PER_FILE = 2
HEADS_PER_FILE = 4
MAX_TRAINING_PROMPT_LEN = 360
MAX_VALIDATION_PROMPT_LEN = 400
VALIDATION_HEADS = 150
MAX_PROMPT_LINES = 40
MIN_BODY_LINES = 4
MIN_STATEMENTS = 3
LOOP_GRAM = 6
LOOP_COUNT = 4
# CPython's flag that reports a text that is valid so far but lacks its end as "incomplete input".
_ALLOW_INCOMPLETE = 0x4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """
    The head of one held-out function.

    Attributes:
        location: ``package/file.py:line`` of the ``def``.
        text: Whole lines, dedented, ending with a newline.
    """

    location: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """
    Sampling params of a completion, with the names and the order of the server.

    Attributes:
        temperature: 0 takes the likeliest token each time.
        min_p: Tokens below this share of the likeliest one's probability are left out.
        repetition_penalty: Divides positive logits of tokens in prompt or output, multiplies
            negative ones.
        frequency_penalty: Taken off a token's logit for each time it is in the output.
    """

    temperature: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """
    Output of the model after one prompt.

    Attributes:
        ids: Generated token ids, without the end token.
        text: Text of these ids.
        has_ended: True if the model itself ended the document.
    """

    ids: list[int]
    text: str
    has_ended: bool


def choose_prompts(files: Iterable[SourceFile]) -> list[Prompt]:
    """Return ``PROMPTS`` heads of held-out functions, in the order of their location's hash."""
    chosen = []
    for file in files:
        if file.is_held_out:
            found = sorted(heads(file), key=lambda prompt: digest(prompt.location))
            chosen += found[:PROMPTS_PER_FILE]
    return sorted(chosen, key=lambda prompt: digest(prompt.location))[:PROMPTS]


def heads(file: SourceFile) -> Iterator[Prompt]:
    """Yield the head of each function of a file that is long enough and starts with ``def``."""
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body:
            continue
        first = min(getattr(item, "lineno", 0) for item in [body[0], *_decorators(body[0])])
        end = node.end_lineno or node.lineno
        head = lines[node.lineno - 1 : first - 1]
        if end - first + 1 < MIN_BODY_LINES or not 0 < len(head) <= MAX_PROMPT_LINES:
            continue
        text = textwrap.dedent("".join(head))
        if text.startswith(("def ", "async def ")):
            yield Prompt(location=f"{file.name}:{node.lineno}", text=text)


def training_heads(
    files: list[SourceFile], tokenizer: Tokenizer, skipped: int = 0
) -> Iterator[Prompt]:
    """Yield distinct heads of functions of training files, without the first ``skipped``."""
    return islice(_training_heads(files, tokenizer), skipped, None)


def _training_heads(files: list[SourceFile], tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Yield some heads of each training file, files by their hash."""
    seen: set[str] = set()
    train = (file for file in files if not file.is_held_out)
    for file in sorted(train, key=lambda file: digest(file.name)):
        found = [head for head in _by_hash(heads(file)) if head.text not in seen]
        fitting = _fitting(found, tokenizer, MAX_TRAINING_PROMPT_LEN)
        for head in islice(fitting, HEADS_PER_FILE):
            seen.add(head.text)
            yield head


def validation_heads(files: list[SourceFile], tokenizer: Tokenizer) -> list[Prompt]:
    """Return heads of held-out functions other than those of the evaluation, by their hash."""
    evaluated = {prompt.location for prompt in choose_prompts(files)}
    held_out = (head for file in files if file.is_held_out for head in heads(file))
    others = _by_hash(head for head in held_out if head.location not in evaluated)
    return list(islice(_fitting(others, tokenizer, MAX_VALIDATION_PROMPT_LEN), VALIDATION_HEADS))


def _by_hash(found: Iterable[Prompt]) -> list[Prompt]:
    return sorted(found, key=lambda head: digest(head.location))


def _fitting(found: list[Prompt], tokenizer: Tokenizer, max_len: int) -> Iterator[Prompt]:
    return (head for head in found if len(tokenizer.encode(head.text).ids) <= max_len)


def digest(location: str) -> bytes:
    """Return the sha256 of a prompt's location, which prompts are ordered by."""
    return hashlib.sha256(location.encode()).digest()


def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, *, limit: int, sampling: Sampling, seed: int
) -> Completion:
    """
    Continue a prompt.

    Args:
        model: The model, fp32.
        tokenizer: Tokenizer of the model.
        prompt: Text placed after the begin token.
        limit: Largest number of new tokens.
        sampling: Sampling params.
        seed: Seed of the draws.
    """
    random = torch.Generator().manual_seed(seed)
    ids = [BOS_ID, *tokenizer.encode(prompt).ids]
    start = len(ids)
    caches = [KvCache() for _ in range(model.config.num_layers)]
    while len(ids) - start < limit:
        with torch.inference_mode():
            logits = model(torch.tensor([ids[caches[0].length :]]), caches)[0, -1]
        token = draw(logits, ids, start, sampling, random)
        if token == EOS_ID:
            break
        ids.append(token)
    made = ids[start:]
    return Completion(ids=made, text=tokenizer.decode(made), has_ended=len(made) < limit)


def draw(
    logits: Tensor, seen: list[int], start: int, sampling: Sampling, random: torch.Generator
) -> int:
    """
    Draw the next token.

    Args:
        logits: Scores ``[V]`` of the next token.
        seen: Ids of prompt and output so far.
        start: Number of ids of the prompt.
        sampling: Sampling params.
        random: Source of randomness.
    """
    if sampling.repetition_penalty != 1:
        known = torch.tensor(sorted(set(seen)))
        scores = logits[known]
        penalty = sampling.repetition_penalty
        scores = torch.where(scores > 0, scores / penalty, scores * penalty)
        logits = logits.index_copy(0, known, scores)
    if sampling.frequency_penalty:
        made = torch.tensor(seen[start:], dtype=torch.long)
        counts = torch.bincount(made, minlength=len(logits))
        logits = logits - sampling.frequency_penalty * counts
    if sampling.temperature == 0:
        return int(logits.argmax())
    weights = (logits / sampling.temperature).softmax(-1)
    weights = weights.masked_fill(weights < sampling.min_p * weights.max(), 0.0)
    return int(torch.multinomial(weights, 1, generator=random))


def loops(ids: list[int]) -> bool:
    """Return True if some ``LOOP_GRAM`` tokens in a row occur more than ``LOOP_COUNT`` times."""
    grams = zip(*(ids[offset:] for offset in range(LOOP_GRAM)), strict=False)
    return max(Counter(grams).values(), default=0) > LOOP_COUNT


def is_clean(prompt: str, completion: Completion) -> bool:
    """Return True if prompt and completion pass the ``clean`` rule of this module."""
    text = _whole_lines(prompt, completion)
    try:
        compile(text, "", "exec", flags=_ALLOW_INCOMPLETE | ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        if error.msg != "incomplete input":
            return False
    except ValueError:
        return False
    return is_cut_clean(prompt, completion)


def is_cut_clean(prompt: str, completion: Completion) -> bool:
    """Return True if prompt and completion pass the ``cut`` rule of this module."""
    lines = _whole_lines(prompt, completion).splitlines(keepends=True)
    prompt_lines = len(prompt.splitlines())
    for end in range(len(lines), prompt_lines, -1):
        try:
            tree = ast.parse("".join(lines[:end]))
        except (SyntaxError, ValueError):
            continue
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
        new = sum(statement.lineno > prompt_lines for statement in statements)
        return new >= MIN_STATEMENTS
    return False


def _whole_lines(prompt: str, completion: Completion) -> str:
    text = prompt + completion.text
    return text if completion.has_ended else text[: text.rfind("\n") + 1]


def _decorators(statement: ast.stmt) -> list[ast.expr]:
    return list(getattr(statement, "decorator_list", []))
