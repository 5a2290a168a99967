mod blk;
mod hostile;
mod registers;
mod rings;
mod world;
