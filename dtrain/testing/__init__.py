"""Fault injection for your own tests of a run: processes that die, disks that lose data, storage that fails, files that
rot; and the tests of an engine.

faults.py    hook.fault._target_=dtrain.testing.faults.AtStep hook.fault.action=kill hook.fault.step=5 hook.fault.rank=1
engine.py    class TestMine(EngineTests): words = ("launcher=mine",)
flaky.py     out=flaky://s3/bucket/run out_options.share=0.2 out_options.kinds=[503,timeout]
"""
