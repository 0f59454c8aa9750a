// The only argument of every kernel, passed by value. cupy_flash/gpu/params.py derives the NumPy dtype from this text,
// so a field is declared here and nowhere else.
#pragma once

// A tensor (b, h, s, d); strides in elements, d contiguous. Per-row arrays (b, h, s) such as lse have one column. A
// packed batch has no axis b: rows are counted over all sequences.
struct Operand {
  void* data;
  long long batch;
  long long head;
  long long row;
  int aligned;  // every row starts at a multiple of this many elements: 8, 4 or 1; also 16 for elements of one byte
};

// A tensor that broadcasts to (b, h, i, j): a broadcast dimension has stride 0.
struct Dense {
  void* data;
  long long batch;
  long long head;
  long long row;
  long long column;
};

#if MODS
#include "captured.cuh"
#endif

struct Params {
  Operand q;
  Operand k;
  Operand v;
  Operand out;
  Operand lse;
  Operand dout;
  Operand dlse;
  Operand delta;
  Operand lse2;     // workspace, shaped like delta
  Operand dq_sums;  // workspaces, laid out by dq_sums.cuh
  Operand dq_semaphore;
  Operand vt;         // fp8 workspace, laid out by wgmma/vt.cuh
  Operand q_descale;  // fp8: (b, kv head); a null pointer means 1
  Operand k_descale;
  Operand v_descale;
  int* tile_counter;  // workspace: the tiles that a grid has drawn (wgmma/tile_scheduler.cuh, wgmma/backward.cuh)
  Operand dq;
  Operand dk;
  Operand dv;
  Dense bias;
  Dense dbias;
  Dense mask;
  float* alibi_slopes;
  long long alibi_batch;  // stride of a sequence; 0: the whole batch has the same slopes
  void* sink;
  void* dsink;
  int* q_lengths;
  int* kv_lengths;
  int* cu_seqlens_q;
  int* cu_seqlens_k;
  int* starts;  // shard: (batch, 3), the positions of the first query and the first key, and the diagonal offset
  long long* seed_array;  // null: use seed
  unsigned long long seed;
  double scale;
  double softcap;
  double keep_scale;        // 1 / (1 - dropout probability)
  unsigned int drop_below;  // dropout keeps a probability if its 16 random bits are at least this
  int step;                 // distance in positions between neighbouring rows: 1, or more for a striped shard
  int first_head;           // shard: global index of its first head
  int whole_heads;          // query heads of the unsharded problem
  int batch;
  int heads;
  int group;  // GQA group: query heads per key/value head
  int q_len;  // rows of the arrays: of one sequence, or of the whole packed batch
  int kv_len;
  int window_left;  // -1: unbounded
  int window_right;
#if DIRECTION
  Operand tq;  // tangents of the inputs that have one, and of the results
  Operand tk;
  Operand tv;
  Operand tout;
  Operand tlse;
  Operand delta_tangent;  // workspace, shaped like delta
  Operand row_numbers;    // workspace: the RowNumbers of every row (row_numbers.cuh); strides in records
  Dense tbias;
  void* tsink;
#endif
#if KV_CACHE
  Operand k_new;  // rows to append; null: none
  Operand v_new;
  Operand q_unrotated;  // with rotary tables: the caller's q; `q` is then a workspace with the rotated rows
  int* cache_seqlens;   // number of keys of each sequence before the append (with slots: after it); null: cache_length
  int* cache_batch_idx;
  int* cache_leftpad;
  int* block_table;
  long long* slots;
  int* positions;
  void* rotary_cos;
  void* rotary_sin;
  float* part_out;  // workspaces: partial results, (number, BLOCK_Q, columns) and (number, BLOCK_Q)
  float* part_lse;
  long long table_row;      // strides
  long long positions_row;  // stride of a sequence; unused in a packed batch
  long long cos_row;
  long long sin_row;
  int partial_results;  // number of partial results for which there is memory
  int cache_length;     // keys of every sequence if cache_seqlens is null
  int cache_capacity;   // keys of a sequence
  int cache_blocks;     // pages, or rows of a contiguous cache
  int cache_rows;       // keys of a page, or of a row of a contiguous cache
  int page_log2;
  int appended;     // rows of k of each sequence of a padded batch
  int rotary_rows;  // rows of the rotary tables
  int mask_keys;    // the dense mask covers this many keys, the last ones of a sequence
#if STATISTICS
  void* part_statistics;  // workspace: PartStatistics (statistics.cuh) of the partial results, (number, BLOCK_Q)
#endif
#if PREFIXES
  int* prefix_table;
  int* prefix_lengths;
  int* prefix_group;
  int* prefix_rows;    // workspaces: the sequence of each query of a group, group after group (prefixes.cuh),
  int* prefix_places;  // the place among them of the first query of a sequence,
  int* prefix_starts;  // (groups + 1, 2): the place of the first query of a group, and its first iteration,
  float* prefix_out;   // and the partial results of the keys of prefixes, as part_out and part_lse
  float* prefix_lse;
  long long prefix_table_row;
  int prefix_groups;
  int prefix_capacity;  // keys of a row of prefix_table
  int prefix_results;
#if STATISTICS
  void* prefix_statistics;
#endif
#endif
#if SCALED_KV
  Operand k_scale;  // one number per key and head of the caches; zeros are null but for codes of 4 bits
  Operand v_scale;
  Operand k_zero;
  Operand v_zero;
#endif
#endif
#if SELECTED
  Dense selected;        // the lists: (batch, head, list, entry)
  int selected_entries;  // of a list
  int selected_rows;     // queries that share a list
  int selected_heads;    // heads that have lists of their own
  int* inverse_ends;     // workspaces of a deterministic backward (inverse_lists.cuh)
  int* inverse_lists;
  Operand dk_sums;  // and of one that adds dK and dV; in the accumulation dtype
  Operand dv_sums;
#endif
#if STATISTICS
  Operand max;  // those that the call does not ask for are null
  Operand argmax;
  Operand entropy;
#endif
#if DSTATISTICS
  Operand dmax;
  Operand dentropy;
#endif
#if WEIGHTS
  Operand result;     // of attention_weights, of top_weights (its values) or of key_importance, whose columns are keys
  int* result_keys;   // top_weights: laid out like `result`
  void* best_scores;  // top_weights: workspace, laid out like `result`
  Dense row_weights;  // key_importance; null: 1
  int* asked_rows;    // attention_weights: the rows of q, counted as in `q`; null: row_first, row_first + row_step, ...
  int* asked_heads;   // null: head_first, head_first + head_step, ...
  int row_first;
  int row_step;
  int head_first;
  int head_step;
  int result_rows;
  int result_columns;
  int result_heads;
  int* row_places;  // in a backward the other way round: the first place of each row of q in the result, -1 for none
  int* row_next;    // and the next place of the row of a place; null: rows row_first, row_first + row_step, ...
  int* head_places;
  int* head_next;
  Dense drow_sums;     // workspace: the gradient of the weight of each row, (batch, head, row)
  Dense drow_weights;  // their sums over the axes along which row_weights broadcast
#endif
#if INDEXER
  Operand head_weights;    // (batch, head, query)
  int* lists;              // result of select_keys: (batch, query, entry)
  void* candidate_scores;  // workspaces of select_keys: (block, row, place)
  int* candidates;
  int* candidate_counts;  // (block, row), of several parts
  int candidate_places;   // of a row
  int parts;              // into which the keys are divided
  int part_keys;
  int list_entries;
  int local_entries;   // that come first
  Dense target;        // selection_loss: (batch, query, entry), the last by `column`
  Dense loss_weights;  // of rows: (batch, query); null: 1
  void* dloss;         // null: 1
  void* loss;
  void* listed_scores;  // workspace: the scores of lists, then their gradients, (batch, query, entry)
  double* row_losses;   // workspace: (batch, query)
  Operand dhead_weights;
#endif
#if MODS
  Captured captured;  // arrays and numbers of a score_mod and a mask_mod
#endif
};

// The argument of partials.cu: results over disjoint sets of keys, a and a stack b, and the merged result.
struct Partials {
  Operand out_a;
  Operand out_b;  // the first array of the stack
  Operand out;
  Operand lse_a;
  Operand lse_b;
  Operand lse;
  long long out_b_next;  // stride of the stack
  long long lse_b_next;
#if STATISTICS
  Operand max_a;  // of a and of b, which is no stack; those that the call does not have are null
  Operand argmax_a;
  Operand entropy_a;
  Operand max_b;
  Operand argmax_b;
  Operand entropy_b;
  Operand max;
  Operand argmax;
  Operand entropy;
  int key_offset_b;  // is added to argmax_b
#endif
  int stacked;  // results in the stack, 1 for a merge of two
  int batch;
  int heads;
  int rows;
};
