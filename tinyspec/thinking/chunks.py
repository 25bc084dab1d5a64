"""What a pass of rows with thoughts makes possible: the chunks that it has computed, and the
thoughts behind them.

The chunks of a pass run as if the thoughts between them were trivial. Those up to the first that is
not are kept; what follows it is to be computed again with its state. Knows no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.outputs import Thought
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.thoughts import Thoughts
from tinyspec.thinking.taps import Span, ThinkingRows
from tinyspec.thinking.thinker import NOT_FINITE, Thinker


@dataclass(eq=False)
class _Chunks:
    """Whole chunks [n, c, d] of one sequence that have no thought, what has run of the next one
    [r, d], and the first tokens of the chunks' thoughts."""

    span: Span
    thoughts: Thoughts
    whole: Tensor
    rest: Tensor
    firsts: list[int]


# Sequences whose thoughts have no finite logits, and what is said of each.
Failed = list[tuple[Sequence, str]]


def think(thinker: Thinker, rows: ThinkingRows, alive: Array, ends: Array) -> Failed:
    """Add the thoughts that a pass has made possible to its prompts. alive [works] bool: whose
    sequences are still there. ends [works]: of their positions; set to where they are good."""
    found = _chunks(rows, alive, ends)
    if some := [each for each in found if len(each.whole)]:
        tokens = iter(thinker.first_tokens(torch.cat([each.whole for each in some])))
        for each in some:
            each.firsts = [next(tokens) for _ in range(len(each.whole))]
            each.span.sequence.stats.thinking_passes += 1
    return _keep(thinker, found, ends)


def _chunks(rows: ThinkingRows, alive: Array, ends: Array) -> list[_Chunks]:
    """Of the sequences that are still there, one of each request: after a change of the model
    several may read the same prompt, and the others go on when its thoughts are known."""
    if rows.hidden is None or not rows.spans:
        return []
    found: list[_Chunks] = []
    known: set[int] = set()
    lengths = [span.end - span.first for span in rows.spans]
    for span, hidden in zip(rows.spans, rows.hidden.split(lengths), strict=True):
        thoughts = span.sequence.request.thoughts
        if not alive[span.work] or thoughts is None:
            continue
        rest = thoughts.rest if span.first > thoughts.known else hidden[:0]
        before = 0 if rest is None else len(rest)
        if id(thoughts) in known or thoughts.known + before != span.first:
            ends[span.work] = min(ends[span.work], thoughts.known)
            continue
        known.add(id(thoughts))
        hidden = torch.cat([rest, hidden])
        size = thoughts.chunk_size
        count = len(hidden) // size
        whole = hidden[: count * size].unflatten(0, (count, size))
        found.append(_Chunks(span, thoughts, whole, hidden[count * size :], []))
    return found


def _keep(thinker: Thinker, found: list[_Chunks], ends: Array) -> Failed:
    """Add thoughts: the trivial ones, and each sequence's first that is not."""
    begun: list[tuple[_Chunks, int]] = []
    end = thinker.config.end_token_id
    for each in found:
        place = next((n for n, token in enumerate(each.firsts) if token != end), None)
        each.thoughts.looked(len(each.firsts), place)
        for _ in each.firsts[:place]:
            number = len(each.thoughts.found)
            each.thoughts.add(Thought(number, [end]), None)
        if place is None:
            each.thoughts.rest = each.rest.clone()
        else:
            begun.append((each, place))
    broken: list[_Chunks] = []
    if begun:
        chunks = torch.stack([each.whole[place] for each, place in begun])
        firsts = [each.firsts[place] for each, place in begun]
        whole = thinker.thoughts(chunks, firsts)
        states = iter(thinker.states([ids for ids in whole if NOT_FINITE not in ids]))
        for (each, _), ids in zip(begun, whole, strict=True):
            if NOT_FINITE in ids:
                broken.append(each)
                continue
            number, cut = len(each.thoughts.found), ids[-1] != end
            each.thoughts.add(Thought(number, ids, cut=cut), next(states))
    for each, _ in begun:
        known, work = each.thoughts.known, each.span.work
        if known < each.thoughts.num_prompt:  # what follows is no draft
            ends[work] = min(ends[work], known)
    failed: Failed = []
    for each in broken:
        # Perhaps by the values of chunks ahead of it, which share a tile of attention: it runs
        # without them, once.
        thoughts = each.thoughts
        thoughts.rest = None
        if thoughts.window == 1:
            why = f"the thought of chunk {len(thoughts.found)} has no finite logits"
            failed.append((each.span.sequence, why))
        thoughts.window = thoughts.width = 1
    return failed
