"""The machine: PTX text, its parser, the lanes and registers, the scheduler, the launch."""
