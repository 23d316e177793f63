"""Only code that is dtrain's, torch's or trusted by name may run."""

import pytest
from small import plan

from dtrain.errors import WordsError


@pytest.mark.parametrize(
    "words",
    [
        ("model._target_=os.system",),
        ("loop=os.system",),
        ("model._target_=dtrain.storage.store.remove",),
        ("model._target_=torch.hub.load",),
        ("model._target_=torch.nn.modules.os.system",),
        ("data=dataset", "data.dataset._target_=subprocess.Popen"),
        (
            "data=dataset",
            "data.dataset.deep.list=[{_target_:subprocess.Popen}]",
            "data.dataset._target_=torch.nn.ModuleList",
        ),
        ("data=dataset", "data.dataset._target_=trustme.Dataset", "trust=[trust]"),
    ],
)
def test_a_stranger_is_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(WordsError, match="is not trusted to run code"):
        plan(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("model._target_=mine.nets.Net", "trust=[mine]"),
        ("data=dataset", "data.dataset._target_=torch.nn.ModuleList"),
        ("loop=mine.loop", "trust=[mine]"),
    ],
)
def test_what_is_trusted_may_run(words: tuple[str, ...]) -> None:
    plan(*words)


def test_the_refusal_says_how_to_trust() -> None:
    with pytest.raises(WordsError, match=r"Type trust=\[mine\]"):
        plan("model._target_=mine.Net")
