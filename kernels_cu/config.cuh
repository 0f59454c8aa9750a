// Compile-time constants of a plan, with their defaults.
//
// cupy_flash/jit/source.py replaces the defaults by the plan's values when it assembles a kernel's text. To allow that,
// every line is a comment or defines one constant, in one of these forms:
//
//     constexpr int NAME = 64;          an integer
//     constexpr bool NAME = false;      for `if constexpr`
//     constexpr float NAME = 0.5f;      a finite number
//     using name = float;               a type, named by one word
//     #define NAME 0                    a switch, 0 or 1, for `#if NAME` and `#if !NAME` with #else and #endif: the
//                                       branch not chosen, and its includes, are absent from the text
//
// Values that follow from constants (number of warps, bytes of a tile) are computed where they are used.
#pragma once

using element = float;        // dtype of Q, K, V and O in global memory; fp8: of O
using kv_element = float;     // dtype of K and V, which a KV cache may have in e4m3
using real = float;           // accumulation dtype of scores, sums and lse: float, or double for double
using bias_element = float;   // dtype of the bias and of its gradient
using sink_element = float;   // dtype of the sink and of its gradient
using other_element = float;  // partials.cu: dtype of the stack of outputs, out_b

constexpr int HEAD_DIM = 64;    // columns of Q and K
constexpr int HEAD_DIM_V = 64;  // columns of V and O
constexpr int BLOCK_Q = 64;     // queries per tile
constexpr int BLOCK_KV = 64;    // keys per tile
constexpr int THREADS = 128;    // per thread block

// Tensor-core engines (mma, wgmma).
constexpr int COLUMN_WARPS = 1;  // warps that share rows: each computes all scores and accumulates part of the columns
constexpr int STAGES = 2;        // slots of the shared-memory pipeline; 1: no prefetch
constexpr bool Q_IN_REGISTERS = false;  // Q fragments stay in registers for the whole mainloop
constexpr float RESCALE_ABOVE = 8.0f;   // lazy rescaling: O is rescaled if a row max grew by more than this, in log2
constexpr int SUM_COLUMNS = 64;         // fp8: columns of O that have a separate sum over one tile of keys at a time
constexpr int LARGEST_LOG2 = 0;         // fp8: probabilities are scaled by 2^LARGEST_LOG2, to use the range of e4m3
constexpr bool MODIFIED = true;         // a pass computes the scores, because they are more than q.k times a scale > 0
constexpr bool LSE2 = false;            // delta.cu writes lse * log2(e) beside delta
constexpr bool FAST_MATH = false;       // functions of a score_mod use ex2.approx and rcp.approx; float only
constexpr bool ADD_DQ = false;          // blocks add to sums of dQ in global memory, which delta.cu zeroes

// The wgmma engine.
constexpr int SHARES = 1;            // backward: warpgroups that share 64 keys
constexpr bool DQ_IN_ORDER = false;  // deterministic dQ: blocks add in the reverse order of their keys
constexpr bool DQ_IN_BULK = false;  // dQ is added by cp.reduce.async.bulk from shared memory, not by red from registers
constexpr bool PERSISTENT = false;  // persistent grid: one block per SM computes several query tiles
constexpr bool DRAWS_TILES = false;  // PERSISTENT: blocks draw tiles from a counter; else each takes every gridDim.x-th
constexpr bool O_BUFFER = false;     // forward: O has shared memory of its own; else it is staged in that of Q
constexpr int POLYNOMIALS = 0;       // of 16 exponentials, those that a polynomial computes on the FMA pipe
constexpr bool STRICT = false;       // tcgen05: an mma that overwrites operands of earlier ones waits for these
constexpr bool PINGPONG = false;     // warpgroups alternate: one issues its wgmmas while the others compute the softmax
constexpr bool RELOAD_SEQUENCE = false;  // forward: rematerialise the sequence from the parameters, to save registers
constexpr bool EXPONENTIALS_FIRST = false;  // forward: ptxas must not hoist the wait for PV above the exponentials
#define KV_MULTICAST 0   // a cluster of two blocks with the same keys: each loads half of every K and V tile for both
#define LONGEST_FIRST 0  // packed backward: the blocks of the longest sequences start first
#define S_AHEAD 0        // backward: S of the next tile overlaps the addition to dQ; unlike DEFERRED, dK does not wait
#define TMA_KV 0         // decode: a warp beside the THREADS that compute loads K and V with TMA
#define CLUSTER_MERGE 0  // decode: the blocks of a cluster compute the parts of one output tile, and merge them
#define STAGED_BIAS 0    // tcgen05: the caller of Score sets the bias, of which a warp has copied a part
#define TMA_STORE_O 0    // store O with TMA; off if a box could overwrite the next sequence, or rows are unaligned

// Options of the call. An option that is absent compiles to nothing.
constexpr bool PACKED = false;        // varlen: sequences are concatenated along the row axis
constexpr bool Q_LENGTHS = false;     // padded batch with a query length per sequence
constexpr bool KV_LENGTHS = false;    // padded batch with a key length per sequence
constexpr bool TOP_LEFT = false;      // the diagonal starts in the top left corner, not in the bottom right
constexpr bool WINDOW_LEFT = false;   // the window is bounded to the left
constexpr bool WINDOW_RIGHT = false;  // the window is bounded to the right; causal is a right bound of 0
constexpr bool DENSE_MASK = false;
constexpr bool SOFTCAP = false;
constexpr bool ALIBI = false;
constexpr bool BIAS = false;
constexpr bool SINK = false;
constexpr bool DROPOUT = false;
constexpr bool DLSE = false;               // lse has a gradient
constexpr bool SCORE_MOD = false;          // a score_mod changes the scores
constexpr bool MASK_MOD = false;           // a mask_mod hides some scores
constexpr bool CAPTURED_GRADIENT = false;  // backward_bias sums the gradient of an array that score_mod reads
constexpr int KEY_BYTES = 0;   // wgmma forward: bytes per key that mods read from shared memory; 0: none is staged
#define SHARED_KV 0            // values are inside the keys: their gradients, and appended rows, are those of the keys
#define MODS 0                 // SCORE_MOD or MASK_MOD: traced.cuh and captured.cuh are generated from the traces
constexpr bool SHARD = false;  // the rows are a shard of longer sequences

// Selected keys: each row sees the keys that a list names (selection.cuh).
#define SELECTED 0                // Params has the lists
constexpr int KEYS_OF_ENTRY = 1;  // neighbouring keys that an entry of a list names
constexpr int HEADS_OF_LIST = 1;  // query heads of a key/value head that share its lists

// Statistics of the rows that a forward returns (statistics.cuh).
#define STATISTICS 0
constexpr bool FIND_MAX = false;
constexpr bool FIND_ARGMAX = false;  // also sets FIND_MAX
constexpr bool ENTROPY = false;

// Their gradients, in a backward.
#define DSTATISTICS 0
constexpr bool DMAX = false;
constexpr bool DENTROPY = false;

// A JVP or a double backward. TQ, TK .. say which inputs have a tangent; MOVES in a name means that an operand has one.
#define DIRECTION 0
constexpr bool TQ = false;
constexpr bool TK = false;
constexpr bool TV = false;
constexpr bool TBIAS = false;
constexpr bool TSINK = false;
constexpr bool TCAPTURED = false;  // an array that score_mod reads has a tangent

// attention_weights, top_weights and key_importance.
#define WEIGHTS 0               // Params has their results and what they ask for
constexpr bool MEAN = false;    // attention_weights: the mean over the heads
constexpr int GRADIENT_OF = 0;  // in a backward, the result that has a gradient: these three, in this order
using weight_element = float;   // dtype of the row weights of key_importance

// The lightning indexer: select_keys and selection_loss.
#define INDEXER 0              // Params has its arrays
using head_element = float;    // dtype of the weights of its heads
using target_element = float;  // dtype of the target of selection_loss
using row_element = float;     // dtype of its row weights

// A KV cache.
#define KV_CACHE 0             // K and V are caches: Params has the arrays that say which keys a sequence has
constexpr bool PAGED = false;  // the caches are pools of pages with a block table
#define PAGE_DIVISION 0        // PAGED: the keys of a page are no power of two
#define SCALED_KV 0            // codes with a scale for each key and head (codes.cuh)
#define SCALES_OF_16_BITS 0    // SCALED_KV: scales and zeros are fp16, else fp32
#define CODES_OF_4_BITS 0      // SCALED_KV: two codes a byte, and a zero for each key and head
#define LATENT 0               // decode: values are the first columns of the keys, and both are read from one tile
#define PREFIXES 0             // PAGED: sequences share prefixes, which precede their own keys (prefixes.cuh)
#define PREFIX_PASS 0          // PREFIXES: a decode of the rows of all sequences of a group, on the keys of its prefix
constexpr int PREFIX_BLOCK_Q = 16;  // PREFIXES: BLOCK_Q of that decode
constexpr int SPLIT_SIZE = 0;       // split-KV: pieces end at multiples of this many keys; 0: equal runs of tiles
constexpr int CLUSTER = 1;          // CLUSTER_MERGE: blocks of a cluster
constexpr int ROTARY_DIM = 0;       // columns of Q and of appended keys that are rotated
constexpr bool ROTARY_INTERLEAVED = false;  // pairs are columns 2n, 2n + 1; else n, n + ROTARY_DIM / 2
using cos_element = float;                  // dtypes of the rotary tables
using sin_element = float;
