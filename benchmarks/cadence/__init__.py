"""Whether a cadence that decides itself keeps its promises, in real trainings on the CPU."""
