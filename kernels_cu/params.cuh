// The one argument of every kernel, passed by value. The NumPy dtype that Python fills is derived from this text
// (cupy_flash/params.py), so a field is added here and nowhere else.
#pragma once

// One tensor (b, h, s, d); strides in elements, d contiguous. Row arrays (b, h, s) such as lse are operands with one
// column. In a packed batch b is not an axis: rows are counted over all sequences.
struct Operand {
  void* data;
  long long batch;
  long long head;
  long long row;
  int aligned;  // every row starts at a multiple of so many elements: 8, 4 or 1
};

// A tensor that broadcasts to (b, h, i, j): a broadcast dimension has stride 0.
struct Dense {
  void* data;
  long long batch;
  long long head;
  long long row;
  long long column;
};

struct Params {
  Operand q;
  Operand k;
  Operand v;
  Operand out;
  Operand lse;
  Operand dout;
  Operand dlse;
  Operand delta;
  Operand lse2;     // a workspace like delta
  Operand dq_sums;  // workspaces, laid out by dq_sums.cuh
  Operand dq_turns;
  Operand vt;         // a workspace of fp8, laid out by wgmma/vt.cuh
  Operand q_descale;  // of fp8 (b, kv head); null: 1
  Operand k_descale;
  Operand v_descale;
  int* drawn;  // a workspace: how many tiles blocks have drawn (wgmma/tile_scheduler.cuh)
  Operand dq;
  Operand dk;
  Operand dv;
  Dense bias;
  Dense dbias;
  Dense mask;
  float* alibi_slopes;
  long long alibi_batch;  // stride; 0: the same slopes for the whole batch
  void* sink;
  void* dsink;
  int* q_lengths;
  int* kv_lengths;
  int* cu_seqlens_q;
  int* cu_seqlens_k;
  int* starts;            // (batch, 3) of a shard: position of its first query, of its first key, and the offset
  long long* seed_array;  // null: seed
  unsigned long long seed;
  double scale;
  double softcap;
  double keep_scale;
  unsigned int drop_below;  // dropout keeps a probability whose 16 random bits are at least this
  int step;                 // positions between neighbouring rows: 1, or more of a shard
  int first_head;           // of a shard
  int whole_heads;          // query heads of what it is a part of
  int batch;
  int heads;
  int group;  // query heads per key/value head
  int q_len;  // rows of the arrays: of one sequence, or of the whole packed batch
  int kv_len;
  int window_left;  // -1: unbounded
  int window_right;
};

// The argument of partials.cu: two results over disjoint sets of keys, and what they make together.
struct Partials {
  Operand out_a;
  Operand out_b;
  Operand out;
  Operand lse_a;
  Operand lse_b;
  Operand lse;
  int rows;
};
