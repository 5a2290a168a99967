//! Finds where guest RAM is and plans DMA windows from it.
