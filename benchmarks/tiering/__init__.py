"""A local tier and an object store behind it: saves, the training beside uploads, resumes."""
