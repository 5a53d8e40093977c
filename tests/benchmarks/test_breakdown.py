"""Sorting traced times by the scopes of a program's instructions."""

import pytest

from benchmarks import breakdown

STEP = "jit(train)/while/body/closed_call/while/body"
PROGRAM = f"""
  %ynn_fusion.1 = f32[3] fusion(%a), metadata={{op_name="{STEP}/jvp(CNN)/conv1/conv3x3/cond/x/conv_general_dilated"}}
  %ynn_fusion.2 = f32[3] fusion(%a), metadata={{op_name="{STEP}/transpose(jvp(CNN))/conv1/conv3x3/kernel_gradient/cond/conv_general_dilated"}}
  %transpose.3 = f32[3] fusion(%a), metadata={{op_name="{STEP}/transpose(jvp(CNN))/conv1/conv3x3/kernel_gradient/transpose"}}
  ROOT %select.4 = f32[3] select(%a), metadata={{op_name="{STEP}/transpose(jvp(CNN))/max_pool_2x2/select_n"}}
  %dot.5 = f32[3] dot(%a), metadata={{op_name="{STEP}/jvp(CNN)/dense1/dot_general"}}
  %add.6 = f32[3] add(%a), metadata={{op_name="{STEP}/optimizer/add"}}
  %add.7 = f32[3] add(%a), metadata={{op_name="jit(train)/while/body/add"}}
  %copy.8 = f32[3] copy(%a)
"""  # noqa: E501


def test_an_instruction_has_the_purpose_of_its_scope():
    assert breakdown.purposes_of(PROGRAM) == {
        "ynn_fusion.1": "convolutions: outputs",
        "ynn_fusion.2": "convolutions: gradient of kernels",
        "transpose.3": "convolutions: layout and padding",
        "select.4": "bias, ReLU, max-pooling, loss",
        "dot.5": "dense layers",
        "add.6": "client's optimizer",
        "add.7": breakdown.OTHER,
        "copy.8": breakdown.COPIES,
    }


def test_an_event_does_not_count_what_happens_inside_it():
    def event(name, start, length, thread=1):
        return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": start, "dur": length}

    events = [
        event("inner", 2, 3),
        event("outer", 0, 10),
        event("innermost", 3, 1),
        event("after", 10, 5),
        event("elsewhere", 0, 7, thread=2),
        {"ph": "M", "pid": 1, "name": "thread_name"},
    ]
    times = dict(breakdown.own_times(events))
    assert times == pytest.approx(
        {"inner": 2e-6, "outer": 7e-6, "innermost": 1e-6, "after": 5e-6, "elsewhere": 7e-6}
    )


def test_events_that_are_no_instructions_do_not_count():
    times = [("a", 1.0), ("b", 3.0), ("waiting", 9.0), ("a", 1.0)]
    assert breakdown.sum_by_purpose(times, {"a": "one", "b": "two"}) == {"two": 3.0, "one": 2.0}
