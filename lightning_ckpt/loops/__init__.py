"""Lightning's training loops: a fit, its position in the data, and preemptions."""
