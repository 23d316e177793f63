"""Likelihoods of tokens, and tokens that a model writes, on any mesh: rank 0 asks, all ranks compute together.

Rows of one forward stay together whatever the number of ranks, and rank r of R takes forwards r, r + R, ... Letters of
the rendezvous store tell the other ranks what comes next, so that rank 0 may take any time between two questions.

Shapes: N rows of tokens, Q questions about them.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.errors import PreflightError, WordsError
from dtrain.evaluation.session import quiet
from dtrain.loop.assemble import Parts
from dtrain.mesh import Mesh
from dtrain.model import evaluating
from dtrain.model.cache import kv_cache
from dtrain.model.sampling import answers
from dtrain.objective import answer

FEW = 64
"""Under mesh.tp rows are as long as a multiple of this: it takes long over each new length."""
LOOK_SECONDS, TELL_SECONDS = 0.005, 20.0
END = "end"

Write = Callable[[list[int]], str]


@dataclass(frozen=True)
class Rows:
    """Rows of whole numbers, of any lengths: row i is values[ends[i - 1] : ends[i]]."""

    values: Tensor
    ends: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "Rows":
        flat = torch.tensor([number for row in rows for number in row], dtype=torch.int64)
        return cls(flat, torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Tensor:
        return self.values[(int(self.ends[index - 1]) if index else 0) : int(self.ends[index])]

    def shared(self, mesh: Mesh) -> "Rows":
        """Those of rank 0, on every rank."""
        if mesh.world == 1:
            return self
        sizes = torch.tensor([len(self.values), len(self.ends)])
        dist.broadcast(sizes, 0)
        values, ends = (
            each if mesh.rank == 0 else torch.empty(int(size), dtype=torch.int64)
            for each, size in zip((self.values, self.ends), sizes, strict=True)
        )
        for each in (values, ends):
            if len(each):
                dist.broadcast(each, 0)
        return Rows(values, ends)


NOTHING = Rows.of([])


class Scoring:
    """The model of `parts`, asked by rank 0 (`likelihoods`, `texts`, and `end` at last), while the others `serve`.
    `decode` gives the text of tokens, on every rank. `batch` rows make a forward of one rank. `tell` is called with the
    progress, now and then.
    """

    def __init__(
        self, parts: Parts, *, batch: int, context: int, ends: set[int], decode: Write, tell: Callable[[str], None]
    ) -> None:
        self._mesh, self._parts, self._batch = parts.mesh, parts, batch
        self._context, self._ends, self._decode = context, ends, decode
        self._asked, self._tell, self._told = 0, tell, time.monotonic()

    # rank 0

    def likelihoods(
        self, rows: Sequence[Sequence[int]], wanted: Sequence[tuple[int, Sequence[int]]]
    ) -> list[list[float]]:
        """(log-likelihood in nats, 1.0 if each token is the likeliest) of each of `wanted`: (number of a row, tokens
        that its last positions should give).
        """
        given = [Rows.of(rows), Rows.of([[row] for row, _ in wanted]), Rows.of([tokens for _, tokens in wanted])]
        result: list[list[float]] = self._ask("likelihoods", {}, given).tolist()
        return result

    def texts(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """The tokens that follow each prompt. `options`: tokens, temperature, top_p, seed, and until, texts that end
        one.
        """
        written: list[list[int]] = self._ask("texts", options, [Rows.of(prompts)])
        return written

    def end(self, problem: str = "") -> None:
        """Let the other ranks go; with a `problem` they raise it too."""
        self._announce(END, {"problem": problem})

    def _ask(self, kind: str, options: Mapping[str, Any], given: Sequence[Rows]) -> Any:
        letter = self._announce(kind, options)
        result = self._answer(kind, options, given)
        if self._mesh.world > 1:
            self._mesh.kv_delete(letter)  # the answer took all ranks, which have read it
        return result

    def _announce(self, kind: str, options: Mapping[str, Any]) -> str:
        letter, self._asked = f"scoring/{self._asked}", self._asked + 1
        if self._mesh.world > 1:
            self._mesh.kv_set(letter, json.dumps([kind, options]))
        return letter

    # the other ranks

    def serve(self) -> None:
        """Answer with rank 0 until it ends. Raises PreflightError with its problem."""
        for kind, options in self._letters():
            self._answer(kind, options, [NOTHING] * (3 if kind == "likelihoods" else 1))

    def _letters(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        while True:
            letter = f"scoring/{self._asked}"
            while (told := self._mesh.kv_get([letter])) is None:
                time.sleep(LOOK_SECONDS)
            self._asked += 1
            kind, options = json.loads(told[0])
            if kind == END:
                if options["problem"]:
                    raise PreflightError(options["problem"])
                return
            yield kind, options

    # all ranks

    def _progress(self, done: int, rows: Rows, what: str) -> None:
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(f"{min(done, len(rows)):,} of {len(rows):,} {what}")

    def _answer(self, kind: str, options: Mapping[str, Any], given: Sequence[Rows]) -> Any:
        shared = [rows.shared(self._mesh) for rows in given]
        # ranks may pass on their tensors in ways of their own
        with evaluating(self._parts.forward), torch.inference_mode(self._mesh.world == 1):
            if kind == "likelihoods":
                return self._likelihoods(*shared)
            return self._texts(*shared, **options)

    def _likelihoods(self, rows: Rows, about: Rows, wanted: Rows) -> Tensor:
        """[Q, 2] on the CPU. Rows are sorted by their length, the longest first."""
        mesh, batch = self._mesh, self._batch
        step = math.lcm(FEW, mesh.shape.tp) if mesh.shape.tp > 1 else 1
        forward = quiet(self._parts.forward, mesh, self._parts.precision, step=step)
        questions: list[list[int]] = [[] for _ in range(len(rows))]
        for number, row in enumerate(about.values.tolist()):
            questions[row].append(number)
        known = torch.zeros(len(wanted), 2, dtype=torch.float64)
        forwards = -(-len(rows) // batch)
        for first in range(0, forwards, mesh.data_ranks):
            self._progress(first * batch, rows, "rows have their likelihood")
            number = first + mesh.data_rank
            idle = number >= forwards
            mine = range(min(batch, len(rows))) if idle else range(number * batch, min((number + 1) * batch, len(rows)))
            logits_BTV = answer(forward(padded([rows[row] for row in mine])))
            if idle or mesh.coordinate["cp"]:
                continue
            for place, row in enumerate(mine):
                asked = {number: wanted[number] for number in questions[row]}
                for number, pair in likelihoods(logits_BTV[place, : len(rows[row])], asked).items():
                    known[number] = pair
        return mesh.sum(known)

    def _texts(self, prompts: Rows, *, until: Sequence[str], **options: Any) -> list[list[int]]:
        mesh, plan = self._mesh, self._parts.plan
        forward = quiet(self._parts.forward, mesh, self._parts.precision, step=plan.tokens_step)
        single = quiet(self._parts.forward, mesh, self._parts.precision, step=mesh.shape.tp)
        tail = max((len(text.encode()) for text in until), default=0) + 2
        is_whole = mesh.shape.pp == mesh.shape.cp == 1
        written = list[tuple[int, list[int]]]()
        with kv_cache(self._parts.model, padded=plan.tokens_step > 1) if is_whole else nullcontext() as cache:
            batch = min(self._batch, cache.most if cache else math.inf)

            def next_logits(tokens: Tensor) -> Tensor:
                return answer((single if cache and tokens.shape[1] == 1 else forward)(tokens))

            lockstep = _Lockstep(mesh, next_logits)
            options |= {"context": self._context, "ends": self._ends, "cache": cache}
            options |= {"done": lambda new: any(text in self._decode(new[-tail:]) for text in until)} if until else {}
            for first in range(0, len(prompts), int(batch) * mesh.data_ranks):
                self._progress(first, prompts, "texts are written")
                begin = first + mesh.data_rank * int(batch)
                mine = range(begin, min(begin + int(batch), len(prompts)))
                if mine:
                    asked = [prompts[each].tolist() for each in mine]
                    written += zip(mine, answers(lockstep.forward, asked, first=begin, **options), strict=True)
                while lockstep.goes_on():
                    if cache:
                        cache.begin(1)
                    next_logits(torch.zeros(1, 1, dtype=torch.int64))
        every = {number: new for rank in mesh.gather(written) for number, new in rank}
        return [every[number] for number in range(len(prompts))]


class _Lockstep:
    """Forwards of ranks that write texts of different lengths: where shards are gathered, all must take part in each,
    so a rank that is done runs empty ones until all are.
    """

    def __init__(self, mesh: Mesh, forward: Callable[[Tensor], Tensor]) -> None:
        self._mesh, self._forward = mesh, forward

    def forward(self, tokens: Tensor) -> Tensor:
        self._others(1.0)
        return self._forward(tokens)

    def goes_on(self) -> bool:
        """Whether another rank runs a forward now; called by one that is done."""
        return self._others(0.0) > 0

    def _others(self, mine: float) -> float:
        return self._mesh.sum(torch.tensor([mine])).item() if self._mesh.data_ranks > 1 else 0.0


def padded(rows: Sequence[Tensor]) -> Tensor:
    """[B, T]: zeros behind the shorter ones, which no causal model sees before."""
    whole = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        whole[place, : len(row)] = row
    return whole


def likelihoods(logits_TV: Tensor, asked: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Number of a question -> its log-likelihood and whether it is greedy, of the tokens that are wanted after the last
    ones of a row. Raises WordsError if there are more of them than the row has.
    """
    most = max(map(len, asked.values()))
    if most > len(logits_TV):
        raise WordsError(f"evaluate.context: an answer has {most} tokens, more than the model sees. Type a larger one.")
    chances_TV = logits_TV[len(logits_TV) - most :].float().log_softmax(-1)
    result = dict[int, Tensor]()
    for number, tokens in asked.items():
        tokens = tokens.to(chances_TV.device)
        last_TV = chances_TV[most - len(tokens) :]
        greedy = (last_TV.argmax(-1) == tokens).all()
        chance = last_TV.gather(1, tokens[:, None]).sum()
        result[number] = torch.stack([chance.double(), greedy.double()]).cpu()
    return result
