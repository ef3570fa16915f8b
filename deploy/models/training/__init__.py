"""Training, export and evaluation of the bundled model; the model card lists the commands."""
