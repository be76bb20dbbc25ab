"""Which instructions the kernel report counts, on listings small enough to count by hand."""

from bench import sass

LISTING = """
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_3:
        /*0010*/               @P1 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/              @!P2 LDG.E R4, desc[UR4][R2.64] ;
        /*0040*/              @!P3 LDG.E R5, desc[UR4][R2.64+0x4] ;
.L_x_1:
        /*0050*/                   FADD R4, R4, R5 ;
.L_x_2:
        /*0060*/                   IADD3 R6, R6, -0x1, RZ ;
        /*0070*/               @P4 BRA `(.L_x_2) ;
        /*0080*/               @P5 BRA `(.L_x_4) ;
        /*0090*/                   DFMA R8, R8, R8, R10 ;
.L_x_4:
        /*00a0*/               @P0 BRA `(.L_x_3) ;
        /*00b0*/                   STG.E [R2.64], R4 ;
        /*00c0*/                   EXIT ;
.L_x_5:
        /*00d0*/                   BRA `(.L_x_5);
"""
STRAIGHT = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/               @P1 STG.E.128 desc[UR4][R2.64], R4 ;
        /*0020*/               @P1 EXIT ;
        /*0030*/              @!P2 STG.E desc[UR4][R2.64], R4 ;
        /*0040*/                   EXIT ;
        /*0050*/                   NOP;
"""
ROW = """
        /*0000*/              @!P0 LDG.E.U16 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 BRA `(.L_x_2) ;
        /*0030*/                   MUFU.EX2 R4, R4 ;
.L_x_2:
        /*0040*/               @P2 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/              @!P3 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0060*/               @P2 BRA `(.L_x_3) ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_4:
        /*0080*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*00a0*/               @P2 BRA `(.L_x_4) ;
        /*00b0*/               @P4 EXIT ;
.L_x_5:
        /*00c0*/                   STG.E.128 desc[UR4][R2.64], RZ ;
        /*00d0*/               @P2 BRA `(.L_x_5) ;
        /*00e0*/                   EXIT ;
.L_x_6:
        /*00f0*/                   BRA `(.L_x_6);
"""


def opcodes(text: str) -> list[str]:
    return [instruction.opcode for instruction in sass.block_path(sass.parse(text))]


def test_loops_are_backward_branches():
    assert sass.loops(sass.parse(LISTING)) == [range(1, 11), range(6, 8)]


def test_tail_and_inner_loop_are_left_out():
    assert opcodes(LISTING) == ["LDG.E.128", "BRA", "FADD", "BRA", "DFMA", "BRA"]


def row_opcodes(text: str) -> list[list[str]]:
    return [[instruction.opcode for instruction in loop] for loop in sass.hot_loops(sass.parse(text))]


def test_each_sweep_over_whole_blocks_of_a_row_is_a_hot_loop():
    """Neither the label's load, nor a narrow loop, nor the zeros of a row without gradient."""
    assert row_opcodes(ROW) == [["LDG.E.128", "BRA", "MUFU.EX2", "BRA"], ["LDG.E.128", "STG.E.128", "BRA"]]


def test_a_loop_over_rows_is_none():
    """The whole listing in one loop: still two sweeps, each on its own."""
    inside = "        /*0000*/                   NOP ;\n"
    around = ".L_x_90:\n" + inside + ROW.replace("@P4 EXIT", "@P4 BRA `(.L_x_90)")
    assert row_opcodes(around) == row_opcodes(ROW)


def test_a_sweep_without_wide_loads_is_no_hot_loop():
    assert row_opcodes(ROW.replace("LDG.E.128 R4", "LDG.E.64 R4")) == [["LDG.E.128", "STG.E.128", "BRA"]]


def test_code_that_jumps_back_into_a_hot_loop_belongs_to_it():
    """What a compiler moves out of a loop's way, here behind the second sweep, is still executed."""
    first, second = row_opcodes(ROW.replace("@P4 EXIT", "@P4 BRA `(.L_x_2)")), row_opcodes(ROW)[1]
    assert len(first) == 1
    assert first[0][-len(second) - 1 :] == [*second, "BRA"]


def test_kernel_without_loop_counts_up_to_the_tail():
    assert opcodes(STRAIGHT) == ["LDG.E.128", "STG.E.128", "EXIT"]
