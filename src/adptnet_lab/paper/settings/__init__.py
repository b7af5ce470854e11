"""Networks, training runs and tasks of the paper that several recipes share."""
