"""tools/machine_code.py on a listing written by hand, in the form that cuobjdump gives."""

import machine_code

LISTING = """
	code for sm_80
	.target	sm_80

		Function : first
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;  /* 0x00000a00 */
                                                             /* 0x000fe400078e00ff */
        /*0010*/                   LDS.U R2, [R1] ;                          /* 0x0 */
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;          /* 0x0 */
        /*0030*/              @!P0 BRA 0x20 ;                                /* 0x0 */
        /*0040*/                   FFMA R5, R5, R5, R5 ;                     /* 0x0 */
        /*0050*/                   FFMA R5, R5, R5, R5 ;                     /* 0x0 */
        /*0060*/                   MUFU.EX2 R5, R5 ;                         /* 0x0 */
        /*0070*/               @P1 BRA 0x40 ;                                /* 0x0 */
        /*0080*/               @P2 BRA 0x10 ;                                /* 0x0 */
        /*0090*/                   STL [R1], R5 ;                            /* 0x0 */
        /*00a0*/                   EXIT ;                                    /* 0x0 */
        /*00b0*/                   BRA 0xb0;                                 /* 0x0 */
        /*00c0*/                   NOP;                                      /* 0x0 */

		Function : second
        /*0000*/                   EXIT ;                                    /* 0x0 */
	code for sm_90a
	.target	sm_90a
		Function : third
        /*0000*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;   /* 0x0 */
"""

RESOURCES = """
Fatbin elf code:
================
arch = sm_80

Resource usage:
 Common:
  GLOBAL:0
 Function first:
  REG:55 STACK:8 SHARED:2048 LOCAL:0 CONSTANT[0]:1048 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_a_listing_is_split_into_kernels():
    found = [(a, name, len(code)) for a, name, code in machine_code.listing(LISTING)]
    assert found == [("sm_80", "first", 13), ("sm_80", "second", 1), ("sm_90a", "third", 1)]


def test_the_main_loop_is_the_innermost_with_matrix_products():
    _, _, code = next(machine_code.listing(LISTING))
    assert sorted(machine_code.innermost_loops(code)) == [(2, 3), (4, 7)]
    first, last = machine_code.main_loop(code)
    assert machine_code.mix(code[first : last + 1]) == {"tensor": 1, "branch": 1}
    without = [c for c in code if not c[1].startswith("HMMA")]
    first, last = machine_code.main_loop(without)
    assert machine_code.mix(without[first : last + 1]) == {"fma": 2, "special": 1, "branch": 1}


def test_instructions_are_counted_by_class():
    _, _, code = next(machine_code.listing(LISTING))
    ones = dict.fromkeys(("integer", "load_shared", "local", "special", "tensor"), 1)
    assert machine_code.mix(code) == {"branch": 5, "fma": 2} | ones
    assert machine_code.main_loop([]) is None


def test_resources_are_those_of_the_kernel():
    assert machine_code.resources(RESOURCES) == {("sm_80", "first"): (55, 8, 2048, 0)}
