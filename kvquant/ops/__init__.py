"""Operations on rows, with their checks and kernels: append, attention, slots, transform."""
