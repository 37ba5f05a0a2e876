"""What Linux says of a processor: its vendor, and whether it multiplies bfloat16."""

from penstock.infra.backends.hardware import Cpu, described, this_cpu


def test_this_machine_s_processor_is_read() -> None:
    assert this_cpu().cores >= 1


def test_instructions_for_bfloat16_are_looked_for_among_the_flags_alone() -> None:
    assert described("processor : 0\nflags\t\t: fpu amx_bf16 amx_tile\n", cores=1).bfloat16
    assert described("Features : fp asimd bf16\n", cores=1).bfloat16
    assert not described("model name : avx512_bf16\nflags : fpu avx512f\n", cores=1).bfloat16


def test_a_processor_has_its_vendor_or_none_that_is_known() -> None:
    assert described("processor\t: 0\nvendor_id\t: GenuineIntel\n", cores=2) == Cpu(cores=2, bfloat16=False, vendor="GenuineIntel")
    assert described("", cores=2).vendor == "unknown"
