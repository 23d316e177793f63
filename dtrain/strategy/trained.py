"""Which parameters are trained: those that ask for a gradient when the model is built. The optimizer, the norm and the
ranks know these alone. A forward, or the model's own `train`, may change `requires_grad` later: copies may rest for a
time, shards may not, and what was frozen at first is trained by nothing.

Uses private attributes of FSDP2: `fsdp_params` of a group, and of a parameter `sharded_param`, `_unsharded_param` and
`_param_fqn`.
"""

from collections.abc import Collection, Iterator

from torch import nn

from dtrain.errors import WordsError
from dtrain.strategy.units import units


class Trained:
    """Create it before the first forward. `roots`: the model, or its stages."""

    def __init__(self, *roots: nn.Module) -> None:
        self._roots = roots
        self._names = {name: each.requires_grad for name, each in self._parameters()}
        self._versions = dict[str, int]()
        """Name -> writes of a gathered parameter, in which those of a gather do not count."""

    def check(self) -> None:
        """Raises WordsError for a parameter that was frozen and asks for a gradient, and for a sharded one whose
        `requires_grad` is another than it was, or that a forward wrote since the last check.
        """
        pieces: dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]] = {}
        for each in (each for root in self._roots for _, group in units(root) for each in group.fsdp_params):
            gathered = getattr(each, "_unsharded_param", each.sharded_param)
            pair = each.sharded_param, gathered
            pieces |= dict.fromkeys(pair, pair)
            if gathered is not each.sharded_param:
                version = gathered._version
                if self._versions.setdefault(each._param_fqn, version) != version:
                    raise lost_write(each._param_fqn)
        for name, parameter in self._parameters():
            asks = {piece.requires_grad for piece in pieces.get(parameter, (parameter,))}
            if True in asks and not self._names.get(name, True):
                raise WordsError(
                    f"model: {name} was frozen when the model was built, and asks for a gradient now, but what is "
                    "trained is decided when the model is built. Build it trained, and freeze it in the forward for as "
                    "long as it is to rest, with strategy=ddp on several ranks; or train it in a second run, which "
                    "begins with init=<this run>."
                )
            if parameter in pieces and asks != {self._names.get(name, parameter.requires_grad)}:
                raise WordsError(
                    f"strategy: requires_grad of {name} was changed after the model was built, but sharded weights are "
                    "reduced together as they were built. Type strategy=ddp."
                )

    def resting(self) -> list[str]:
        """The names of the trained parameters that are frozen now."""
        return [name for name, each in self._parameters() if self._names.get(name) and not each.requires_grad]

    def rest(self, names: Collection[str]) -> None:
        """Freeze these of the trained parameters, and no others."""
        for name, parameter in self._parameters():
            if self._names.get(name):
                parameter.requires_grad_(name not in names)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for root in self._roots for pair in root.named_parameters())


def lost_write(name: str) -> WordsError:
    """The error of a forward that writes a sharded parameter."""
    return WordsError(
        f"strategy: the forward writes {name}, but the weights are sharded and gathered for the forward alone, so what "
        "it writes is lost. Type strategy=ddp, or keep what the forward changes in a buffer."
    )
