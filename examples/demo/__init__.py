"""The main job: kill a real training run in the middle of a save, resume it, show that nothing was lost."""
