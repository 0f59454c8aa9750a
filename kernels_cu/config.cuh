// The names a kernel may use, with defaults: what a plan decides, known when the kernel is compiled.
//
// cupy_flash/source.py puts the plan's values in place of the defaults when it assembles the text. So that it can,
// every line is a comment or defines one constant, in one of these forms:
//
//     constexpr int NAME = 64;          a whole number
//     constexpr bool NAME = false;      for `if constexpr`
//     constexpr float NAME = 0.5f;      a finite number
//     using name = float;               a type by its one-word name
//     #define NAME 0                    a switch, 0 or 1, for `#if NAME` and `#if !NAME` with #else and #endif: the
//                                       branch not chosen, and what it includes, is absent from the text
//
// What follows from constants (warps, bytes of a tile) is computed where it is used, not here.
#pragma once

using element = float;        // of Q, K, V and O in global memory; of fp8: of O
using real = float;           // of scores, sums and lse: float, or double for double
using bias_element = float;   // of the bias and its gradient
using sink_element = float;   // of the sink and its gradient
using other_element = float;  // of the second of two partial results

constexpr int HEAD_DIM = 64;    // of Q and K
constexpr int HEAD_DIM_V = 64;  // of V and O
constexpr int BLOCK_Q = 64;     // queries per block of threads
constexpr int BLOCK_KV = 64;    // keys per step
constexpr int THREADS = 128;    // per block

// The mma engine's.
constexpr int COLUMN_WARPS = 1;         // warps that share rows and split the columns of what they accumulate
constexpr int STAGES = 2;               // tiles of keys in shared memory, all but one on their way; 1: no pipeline
constexpr bool Q_IN_REGISTERS = false;  // as fragments, for all keys
constexpr float RESCALE_ABOVE = 8.0f;   // a probability may grow to 2^this before the reference of its row moves
constexpr int SUM_COLUMNS = 64;         // of O in fp8: their sums over a tile of keys are made at once
constexpr int LARGEST_LOG2 = 0;         // of the probability where the reference of its row is: 2^this
constexpr bool MODIFIED = true;         // scores are more than q.k times a positive scale
constexpr bool LSE2 = false;            // delta.cu writes lse in powers of two beside delta
constexpr bool ADD_DQ = false;          // dQ is added up in global memory, in any order; delta.cu clears the sums

// The wgmma engine's.
constexpr int SHARES = 1;            // backward: warpgroups that share keys
constexpr bool DQ_IN_ORDER = false;  // each block adds to dQ after those of the keys before it: the same sum every time
constexpr bool DQ_IN_BULK = false;   // dQ is added to from shared memory, not from registers
constexpr bool PERSISTENT = false;  // a block for each multiprocessor, which draws tiles of queries one after the other
constexpr bool PINGPONG = false;    // one warpgroup begins products while others work out probabilities
#define KV_MULTICAST 0              // two blocks that visit the same keys bring half of each tile of them to both
#define TMA_STORE_O 0               // O leaves in boxes; else row by row, where a box would reach another sequence's

// What a call asks for: the struct of a feature that is absent compiles to nothing.
constexpr bool PACKED = false;        // sequences of different lengths in one row of tokens
constexpr bool Q_LENGTHS = false;     // padded batches: how many queries of each sequence count
constexpr bool KV_LENGTHS = false;    // and how many keys
constexpr bool TOP_LEFT = false;      // the diagonal starts in the top left corner, not in the bottom right
constexpr bool WINDOW_LEFT = false;   // a window is bounded to the left
constexpr bool WINDOW_RIGHT = false;  // and to the right; causal is a window with nothing to the right
constexpr bool DENSE_MASK = false;
constexpr bool SOFTCAP = false;
constexpr bool ALIBI = false;
constexpr bool BIAS = false;
constexpr bool SINK = false;
constexpr bool DROPOUT = false;
constexpr bool DLSE = false;   // lse has a gradient
constexpr bool SHARD = false;  // the rows are a part of longer sequences
