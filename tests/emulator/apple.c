// Has OpenCL build a program in SPIR-V. Mesa's compiler for Apple's GPUs prints what it makes of it.
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>

#define CHECK(what) if (error) return fprintf(stderr, "%s: error %d\n", what, error), 1

int main(int count, char **arguments) {
  static char text[1 << 24], log[1 << 16];
  cl_int error;
  cl_platform_id platform;
  cl_device_id gpu;
  FILE *file = count == 2 ? fopen(arguments[1], "rb") : NULL;
  if (!file) return fprintf(stderr, "usage: apple FILE.spv\n"), 1;
  size_t size = fread(text, 1, sizeof text, file);
  error = clGetPlatformIDs(1, &platform, NULL);
  CHECK("platform");
  error = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &gpu, NULL);
  CHECK("device");
  cl_context context = clCreateContext(NULL, 1, &gpu, NULL, NULL, &error);
  CHECK("context");
  cl_program program = clCreateProgramWithIL(context, text, size, &error);
  CHECK("program");
  error = clBuildProgram(program, 1, &gpu, "-cl-std=CL3.0", NULL, NULL);
  clGetProgramBuildInfo(program, gpu, CL_PROGRAM_BUILD_LOG, sizeof log, log, NULL);
  if (error) fputs(log, stderr);
  CHECK("build");
  cl_kernel made = clCreateKernel(program, "entry", &error);
  CHECK("kernel");
  cl_ulong shared = 0;
  clGetKernelWorkGroupInfo(made, gpu, CL_KERNEL_LOCAL_MEM_SIZE, sizeof shared, &shared, NULL);
  fprintf(stderr, "shared memory: %lu bytes\n", (unsigned long)shared);
  return 0;
}
