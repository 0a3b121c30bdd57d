"""The one Trainer shell: step loop, state, schedules, signals."""
