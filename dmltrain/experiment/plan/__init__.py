"""What an experiment file asks for: read, checked, and laid out as the cells of a grid."""
