"""Reading HLO as XLA prints it: types, operands, loops, what is called."""

from jaxspec.compiled.text import Program, Shape

TEXT = """HloModule jit_step, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]}

%body.1 (carry: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %carry = (s32[], /*index=1*/f32[4,8]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %value = f32[4,8]{1,0} get-tuple-element(%carry), index=1
  %said = f32[4,8]{1,0} custom-call(%value), custom_call_target="a \\"quoted (", \
backend_config={"x":"("}
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%number, %said)
}

%condition.1 (carry: (s32[], f32[4,8])) -> pred[] {
  %carry.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.3_spmd (param: f32[4,8]) -> f32[4,8] {
  %param = f32[4,8]{1,0:T(8,128)} parameter(0), metadata={op_name="state.weights"}
  %zero = s32[] constant(0)
  %first = (s32[], f32[4,8]{1,0}) tuple(%zero, %param)
  %while.2 = (s32[], f32[4,8]{1,0}) while(%first), condition=%condition.1, body=%body.1, \
metadata={op_name="jit(step)/train/while"}, backend_config={"known_trip_count":{"n":"36"}}
  %open.2 = (s32[], f32[4,8]{1,0}) while(%while.2), condition=%condition.1, body=%body.1
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%open.2), index=1
}
"""


def test_instructions_have_types_operands_and_what_they_call() -> None:
    program = Program(TEXT)
    assert program.entry == "main.3_spmd"
    loop = program.instructions_by_name["main.3_spmd"]["while.2"]
    assert (loop.opcode, loop.operands, loop.trip_count) == ("while", ("first",), 36)
    assert loop.results == (Shape("s32", ()), Shape("f32", (4, 8)))
    assert loop.scope == "jit(step)/train/while"
    assert program.find_callees(loop) == ["condition.1", "body.1"]
    assert program.instructions_by_name["main.3_spmd"]["open.2"].trip_count is None
    said = program.instructions_by_name["body.1"]["said"]
    assert (said.opcode, said.operands, said.result_bytes) == ("custom-call", ("value",), 128)
    assert [each.name for each in program.computations["main.3_spmd"] if each.is_root] == ["out"]


def test_what_a_loop_reaches() -> None:
    program = Program(TEXT)
    loops = program.reachable_from(lambda each: each.opcode == "while" and each.trip_count == 36)
    assert loops == {"body.1", "condition.1"}
    assert program.reachable_computations(["main.3_spmd"]) == loops | {"main.3_spmd"}


def test_bytes_of_types() -> None:
    sizes = {Shape("bf16", (3, 5)): 30, Shape("pred", (7,)): 7, Shape("s4", (3,)): 2}
    sizes |= {Shape("f8e4m3fn", (6,)): 6, Shape("token", ()): 0, Shape("f32", ()): 4}
    assert {shape: shape.byte_count for shape in sizes} == sizes
