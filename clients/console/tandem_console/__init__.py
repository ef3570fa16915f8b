"""Web console of a scheduler, for operators: a page that shows what `tandem top` shows."""
