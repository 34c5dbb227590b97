"""Collectives counted in a program's text: kinds, groups, loops, bytes."""

import pytest

from benchmarks.compiled.collectives import (
    axes_of_group,
    collectives,
    sent_by_axes,
    sent_by_layers,
)

TEXT = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %carry = (s32[], f32[8,16]) parameter(0)
  %rows = f32[8,16]{1,0} get-tuple-element(%carry), index=1
  %sums = f32[8,16]{1,0} all-reduce(%rows), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add
  ROOT %out = (s32[], f32[8,16]) tuple(%sums, %sums)
}

%condition (carry: (s32[], f32[8,16])) -> pred[] {
  ROOT %more = pred[] constant(true)
}

ENTRY %main (weights: bf16[4,16]) -> f32[8,16] {
  %weights = bf16[4,16]{1,0} parameter(0)
  %whole = (bf16[4,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%w), replica_groups={{0,2},{1,3}}
  %done = bf16[8,16]{1,0} all-gather-done(%whole)
  %loop = (s32[], f32[8,16]) while(%s), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %parts = (f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%a, %b), replica_groups=[2,2]<=[2,2]T(1,0)
  %p = f32[2,4]{1,0} reduce-scatter(%c), replica_groups=mesh['a'=2,'b'=2] {'a','b'}, to_apply=%add
  %sent = f32[2,4]{1,0} collective-permute(%d), source_target_pairs={{0,1},{1,0}}
  ROOT %r = f32[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""
STARTED = """
ENTRY %main (weights: f32[8,16]) -> f32[8,16] {
  %p = ((f32[8,16]{1,0}), f32[4,16]{1,0}) reduce-scatter-start(%w), replica_groups={{0,1},{2,3}}
  %q = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-to-all-start(%w), replica_groups={{0,1},{2,3}}
  %s = (f32[8,16]{1,0}, f32[2]{0}) all-reduce-start(%w, %x), replica_groups={{0,1},{2,3}}
}
"""
MESH = {"data": 2, "model": 2}


def test_loops_count_as_often_as_they_run():
    found = {one.kind: one for one in collectives(TEXT)}
    assert found["all-reduce"].times == 5
    assert found["all-gather"].times == 1
    assert len(found) == 5


@pytest.mark.parametrize(
    ("operands", "direction", "times"),
    [
        ("%i, %n", "LT", 7),
        ("s32[] %i, s32[] %n", "LT", 7),
        ("%i, %m", "LT", 1),
        ("%i, %n", "GT", 1),
    ],
)
def test_a_loop_without_a_number_runs_up_to_the_constant_of_its_condition(
    operands, direction, times
):
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    text = text.replace("while(%s), body", "while(%s), condition=%condition, body")
    condition = f"""  %n = s32[]{{:T(128)}} constant(7)
  ROOT %more = pred[] compare({operands}), direction={direction}"""
    text = text.replace("  ROOT %more = pred[] constant(true)", condition)
    found = {one.kind: one for one in collectives(text)}
    assert found["all-reduce"].times == times


def test_groups_are_read_in_every_notation():
    found = {one.kind: one.group for one in collectives(TEXT)}
    assert found["all-reduce"] == (0, 1)
    assert found["all-gather"] == (0, 2)
    assert found["all-to-all"] == (0, 2)
    assert found["reduce-scatter"] == (0, 1, 2, 3)
    assert found["collective-permute"] == (0, 1)
    permuted = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}"
    text = TEXT.replace("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", permuted)
    assert {one.kind: one.group for one in collectives(text)}["reduce-scatter"] == (0, 2)


def test_bytes_are_those_of_a_ring_by_mesh_axis():
    sent = sent_by_axes(collectives(TEXT), MESH)
    assert sent == {
        "data": {"all-gather": 8 * 16 * 2 / 2, "all-to-all": 2 * 2 * 4 * 4 / 2},
        "model": {"all-reduce": 5 * 2 * 8 * 16 * 4 / 2, "collective-permute": 2 * 4 * 4},
        "data,model": {"reduce-scatter": 3 * 2 * 4 * 4},
    }


def test_bytes_are_told_apart_by_the_layer_that_they_come_from():
    row = "bf16[8,16]{1,0} all-gather(%w), replica_groups={{0,1},{2,3}}, metadata={op_name="
    sources = ("layer_10/scan", "transpose(jvp(layer_2))/dot", "layer_2/ppermute", "my_layer_2x")
    parts = [f'  %g{i} = {row}"jit(f)/{source}"}}' for i, source in enumerate(sources)]
    text = "\n".join(["ENTRY %main (w: bf16[4,16]) -> bf16[8,16] {", *parts, "}"])
    one = 8 * 16 * 2 / 2
    found = sent_by_layers(collectives(text), MESH)
    assert found == {"layer_2": 2 * one, "layer_10": one, "others": one}
    assert list(found) == ["layer_2", "layer_10", "others"]
    assert set(sent_by_layers(collectives(TEXT), MESH)) == {"others"}


def test_operands_of_started_collectives_are_not_sent_besides():
    assert sent_by_axes(collectives(STARTED), MESH) == {
        "model": {
            "reduce-scatter": 4 * 16 * 4,
            "all-to-all": 8 * 16 * 4 / 2,
            "all-reduce": (8 * 16 + 2) * 4,
        },
    }


def test_a_collective_spread_over_fusions_counts_once():
    """A TPU's text names it in every fusion of its chain."""
    rows = "bf16[8,16]{1,0} all-gather(%w), replica_groups={{0,1},{2,3}}, channel_id=7"
    parts = [f'  %g{i} = {rows}, frontend_attributes={{chain_id="0"}}' for i in range(3)]
    other = f'  %h = {rows}, frontend_attributes={{chain_id="1"}}'
    text = "\n".join(["ENTRY %main (w: bf16[4,16]) -> bf16[8,16] {", *parts, other, "}"])
    assert sent_by_axes(collectives(text), MESH) == {"model": {"all-gather": 2 * 8 * 16 * 2 / 2}}


def test_a_group_names_the_axes_along_which_it_lies():
    mesh = {"data": 2, "fsdp": 4, "model": 2}
    assert axes_of_group((0, 1), mesh) == ("model",)
    assert axes_of_group((0, 2, 4, 6), mesh) == ("fsdp",)
    assert axes_of_group((0, 8, 2, 10), mesh) == ("data", "fsdp")
    assert axes_of_group((), mesh) == ("data", "fsdp", "model")


def test_groups_in_an_unknown_notation_are_an_error():
    with pytest.raises(ValueError, match=r"unknown format.*replica_groups=circle"):
        collectives(TEXT.replace("replica_groups=[2,2]<=[4]", "replica_groups=circle"))
