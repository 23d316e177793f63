"""Whether a model that overrides how it lists its parameters lists those that its modules hold."""

from torch import nn

from dtrain.errors import WordsError
from dtrain.model import own_class


def check_listed(model: nn.Module) -> None:
    """Raises WordsError for a module whose `parameters` or `named_parameters` lists others than its modules hold:
    strategies and checkpoints take what modules hold, and an optimizer what is listed.
    """
    for module in model.modules():
        kind = type(module)
        if (kind.parameters, kind.named_parameters) == (nn.Module.parameters, nn.Module.named_parameters):
            continue
        if not all(_is_whole(module, recurse=recurse) for recurse in (True, False)):
            raise WordsError(
                f"model: {own_class(module).__name__} overrides parameters or named_parameters, which lists other "
                "parameters than its modules hold, or takes no argument `recurse`. Leave the method out. For what is "
                "not to be trained call requires_grad_(False), or type model.freeze=[<its name>]."
            )


def _is_whole(module: nn.Module, *, recurse: bool) -> bool:
    held = sorted(id(each) for _, each in nn.Module.named_parameters(module, recurse=recurse))
    try:
        listed = sorted(id(each) for each in module.parameters(recurse=recurse))
        named = sorted(id(each) for _, each in module.named_parameters(recurse=recurse))
    except TypeError:
        return False
    return listed == named == held
