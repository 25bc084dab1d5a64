"""Commits thoughts: which chunks that have run stay, and what was thought behind them.

The chunks of a pass ran as if the thoughts between them were trivial. Those up to the first that is
not are kept; what follows it is truncated, and runs again with its state. Knows no logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.engine.commit import Committer
from tinyspec.engine.in_flight import InFlightPass
from tinyspec.engine.launcher import FailedPass
from tinyspec.outputs import Thought
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.thoughts import Thoughts
from tinyspec.thinking.taps import Span
from tinyspec.thinking.thinker import NOT_FINITE, Thinker


@dataclass(eq=False)
class _Chunks:
    """Whole chunks [n, c, d] of one sequence that have no thought, what has run of the next one
    [r, d], and the first tokens of the chunks' thoughts. canonical: the hidden states are."""

    span: Span
    thoughts: Thoughts
    whole: Tensor
    rest: Tensor
    firsts: list[int]
    canonical: bool


@dataclass(eq=False)
class ThoughtCommitter:
    """Adds thoughts to prompts, and truncates what was computed without their states."""

    committer: Committer
    thinker: Thinker

    def commit(self, launched: InFlightPass) -> Array:
        """[works] int64: up to where the positions of each work in a pass that has run are good.
        Raises FailedPass where a block raises."""
        ends: Array = launched.works.ends.copy()
        thinking = launched.thinking
        if thinking is None or thinking.hidden is None or not thinking.spans:
            return ends
        found = self._chunks(launched, ends)
        try:
            self._first_tokens(found)
            self._keep(found, ends)
        except Exception as error:
            raise FailedPass from error
        self._truncate(launched, ends)
        return ends

    def _chunks(self, launched: InFlightPass, ends: Array) -> list[_Chunks]:
        """Of the sequences that are still there, one of each request: after a change of the model
        several may read the same prompt, and the others go on when its thoughts are known."""
        thinking, alive = launched.thinking, launched.alive
        assert thinking is not None and thinking.hidden is not None
        lengths = [span.end - span.first for span in thinking.spans]
        found: list[_Chunks] = []
        known: set[int] = set()
        for span, hidden in zip(thinking.spans, thinking.hidden.split(lengths), strict=True):
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
            canonical = span.sequence.canonical >= span.sequence.computed
            canonical &= launched.work_pass.canonical and self.thinker.batches.proven
            found.append(_Chunks(span, thoughts, whole, hidden[count * size :], [], canonical))
        return found

    def _first_tokens(self, found: list[_Chunks]) -> None:
        some = [each for each in found if len(each.whole)]
        if not some:
            return
        tokens = iter(self.thinker.first_tokens(torch.cat([each.whole for each in some])))
        for each in some:
            each.firsts = [next(tokens) for _ in range(len(each.whole))]
            each.span.sequence.stats.thinking_passes += 1

    def _keep(self, found: list[_Chunks], ends: Array) -> None:
        """Add thoughts: the trivial ones, and each sequence's first that is not."""
        begun: list[tuple[_Chunks, int]] = []
        end = self.thinker.config.end_token_id
        for each in found:
            place = next((n for n, token in enumerate(each.firsts) if token != end), None)
            each.thoughts.looked(len(each.firsts), place)
            for _ in each.firsts[:place]:
                number = len(each.thoughts.found)
                each.thoughts.add(Thought(number, [end]), None, each.canonical)
            if place is None:
                each.thoughts.rest = each.rest.clone()
            else:
                begun.append((each, place))
        broken = [each for each, place in begun if each.firsts[place] == NOT_FINITE]
        begun = [(each, place) for each, place in begun if each.firsts[place] != NOT_FINITE]
        if begun:
            chunks = torch.stack([each.whole[place] for each, place in begun])
            firsts = [each.firsts[place] for each, place in begun]
            whole = self.thinker.thoughts(chunks, firsts)
            good = [ids if NOT_FINITE not in ids else [] for ids in whole]
            states = iter(self.thinker.states([ids for ids in good if ids]) if any(good) else ())
            for (each, _), ids in zip(begun, good, strict=True):
                if not ids:
                    broken.append(each)
                    continue
                cut = ids[-1] != end
                number = len(each.thoughts.found)
                each.thoughts.add(Thought(number, ids, cut=cut), next(states), each.canonical)
        for each, _ in begun:
            known, work = each.thoughts.known, each.span.work
            if known < each.thoughts.num_prompt:  # what follows is no draft
                ends[work] = min(ends[work], known)
        for each in broken:
            self._break(each, ends)

    def _break(self, each: _Chunks, ends: Array) -> None:
        """Logits of a thought were not finite, perhaps by the values of chunks ahead of it, which
        share a tile of attention: run it without them, once."""
        thoughts, sequence = each.thoughts, each.span.sequence
        ends[each.span.work] = thoughts.known
        thoughts.rest = None
        if thoughts.window == 1:
            number = len(thoughts.found)
            self.committer.fail(sequence, f"the thought of chunk {number} has no finite logits")
        thoughts.window = thoughts.width = 1

    def _truncate(self, launched: InFlightPass, ends: Array) -> None:
        assert launched.thinking is not None
        alive = launched.alive
        for span in launched.thinking.spans:
            for sequence in span.sequence.request.sequences:
                sequence.thought()
            if alive[span.work] and ends[span.work] < launched.works.ends[span.work]:
                # Shared pages hold what is good, and are not written again.
                kept = max(int(ends[span.work]), span.sequence.frozen)
                self.committer.admission.truncate(span.sequence, kept)
