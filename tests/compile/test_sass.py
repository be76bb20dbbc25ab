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


def opcodes(text: str) -> list[str]:
    return [instruction.opcode for instruction in sass.block_path(sass.parse(text))]


def test_loops_are_backward_branches():
    assert sass.loops(sass.parse(LISTING)) == [range(1, 11), range(6, 8)]


def test_tail_and_inner_loop_are_left_out():
    assert opcodes(LISTING) == ["LDG.E.128", "BRA", "FADD", "BRA", "DFMA", "BRA"]


def test_kernel_without_loop_counts_up_to_the_tail():
    assert opcodes(STRAIGHT) == ["LDG.E.128", "STG.E.128", "EXIT"]
