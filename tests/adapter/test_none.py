"""none: the model is as it was."""

from small import small_gpt

from dtrain.adapter.none import build
from dtrain.model.adapted import adapter_of, layers


def test_nothing_is_added_or_frozen() -> None:
    model = small_gpt()
    before = dict(model.named_parameters())
    build()(model)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.requires_grad for name, parameter in before.items())
    assert after.keys() == before.keys()
    assert adapter_of(model) is None and not layers(model)
