"""Values that are allowed alone and not together."""

import pytest
from small import plan

from dtrain.errors import WordsError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.heads=3",), "model.width=128 is no multiple of 2 x model.heads=3. Type model.width=126."),
        (
            ("model.heads=4", "model.kv_heads=3"),
            "model.heads=4 is no multiple of model.kv_heads=3. Type model.heads=3.",
        ),
        (("model=moe", "model.active=9"), "model.active=9 is more than model.experts=8. Type model.active=8."),
        (("model.vocab=100",), "Type model.vocab=auto."),
        (("data=synthetic", "data.vocab=20", "model.vocab=10"), "tokens up to 19"),
        (("data=synthetic", "model=mlp", "model.inputs=3"), "Type model.inputs=auto."),
        (("data=synthetic", "model=cnn", "data.inputs=[3]"), "Type data.inputs=[1,8,8]."),
        (("data=synthetic", "model=cnn", "model.outputs=3"), "Type model.outputs=auto."),
        (("resume=must", "init=runs/a"), "leave init out"),
        (("resume=must", "fork=runs/a"), "leave fork out"),
        (("init=runs/b", "fork=runs/a"), "fork=runs/a brings the weights of that run, but so does init=runs/b"),
        (("out=runs/a", "fork=runs/a/checkpoints/step-00000100"), "is this run: out=runs/a"),
        (("stop_after=2000",), "stop_after=2000 is never reached: steps=1000."),
        (("schedule.warmup=200", "steps=100"), "schedule.warmup=200 is longer than steps=100."),
        (
            ("data=synthetic", "model=cnn", "model.width=1", "model.stages=5"),
            "stage 4 has one number per group of channels of an image [1, 8, 8]",
        ),
        (
            ("data=synthetic", "model=cnn", "model.width=1", "model.inputs=[2,1,1]", "data.inputs=[2,1,1]"),
            "Type model.width=16, or larger images.",
        ),
        (("sweep.out=x",), "Type -m for a sweep, out=<folder> for a run"),
        (("adapter=lora", "adapter.targets=[]"), "adapter.targets=[] selects no layer"),
        (("spike.window=16",), "spike.window: nothing in this run reads it."),
        (("data=synthetic", "generate.tokens=3"), "Type data=text"),
    ],
)
def test_what_does_not_go_together_is_told(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "words",
    [("model.heads=8",), ("model.kv_heads=2",), ("model.vocab=300",), ("resume=never", "init=runs/a"), ("steps=4",), ("spike.window=16", "on_spike=skip"),
     ("data=synthetic", "model=cnn", "model.width=16", "data.inputs=[1,2,2]"), ("data=synthetic", "model=mlp", "model.inputs=64"), ("data=tokens", "data.path=x.npy", "model.vocab=50304")],
)  # fmt: skip
def test_what_goes_together_is_taken(words: tuple[str, ...]) -> None:
    plan(*words)
