// Scales of Q, K and V in e4m3, one per sequence and key/value head.
#pragma once
#include "params.cuh"

struct Descales {
  float qk;
  float v;

  // @descale-S
  __device__ Descales(const Params& p, int b, int kv_head)
      : qk(of(p, p.q_descale, b, kv_head) * of(p, p.k_descale, b, kv_head)), v(of(p, p.v_descale, b, kv_head)) {}

  // The rows past a packed batch's last sequence have no descale.
  __device__ static float of(const Params& p, const Operand& x, int b, int kv_head) {
    return x.data && b < p.batch ? ((const float*)x.data)[b * x.batch + kv_head * x.head] : 1.0f;
  }

  // The scale of the bare q.k. If it is folded into the exponent, the softmax divides by it, so it is clamped: it must
  // not be 0, and at 2^-100 all scores are equal, as they are at 0.
  __device__ float scale(const Params& p, bool in_exponent) const {
    float x = (float)p.scale * qk;  // @descaled-scale
    if (!in_exponent) return x;
    return x < 0x1p-100f ? 0x1p-100f : x > 0x1p100f ? 0x1p100f : x;
  }
};
