// What changes from chunk to chunk of a prompt, in device memory: captured graphs keep their arguments and read these.
//
// The host writes them before a chunk's first kernel, which waits for everything before it. So every other kernel of the chunk may read them ahead of its own
// wait. A chunk may be launched for more tokens than it has; what comes of the others is dropped: no page holds it.
#pragma once

namespace nanoqwen {

struct Span {
  int position;  // of the chunk's first token; the cache holds as many before it
  int n;         // tokens of the chunk
};

}  // namespace nanoqwen
