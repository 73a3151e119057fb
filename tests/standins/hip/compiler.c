/* HIP's run-time compiler: hands a program to hip_kernels.py, which calls the host's compiler. */
#include "standin.h"
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_INPUT = 3, COMPILATION = 6 };

typedef struct program { char *source, *log, *code; size_t code_nbytes; } *hiprtcProgram;

int hiprtcVersion(int *major, int *minor) { *major = 7; *minor = 0; return SUCCESS; }
const char *hiprtcGetErrorString(int error) {
    return error ? "the program cannot be compiled" : "success";
}

int hiprtcCreateProgram(hiprtcProgram *program, const char *source, const char *name, int n_headers,
                        const char **headers, const char **names) {
    (void)name, (void)headers, (void)names;
    if (n_headers) return INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    (*program)->source = strdup(source);
    (*program)->log = strdup("");
    return SUCCESS;
}

int hiprtcDestroyProgram(hiprtcProgram *program) {
    free((*program)->source);
    free((*program)->log);
    free((*program)->code);
    free(*program);
    *program = NULL;
    return SUCCESS;
}

static char *contents(const char *folder, const char *name, size_t *nbytes) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *nbytes = 0;
    FILE *file = fopen(path, "rb");
    if (!file) return strdup("");
    char *data = NULL;
    FILE *out = open_memstream(&data, nbytes);
    for (int c; (c = fgetc(file)) != EOF;) fputc(c, out);
    fclose(file);
    fclose(out);
    return data;
}

static int compiled(const char *folder, int n, const char **options) {
    const char *arguments[n + 6];
    int at = 0;
    arguments[at++] = STANDIN_PYTHON;
    arguments[at++] = "-ISE";
    arguments[at++] = STANDIN_SCRIPT;
    arguments[at++] = folder;
    for (int i = 0; i < n; i++) arguments[at++] = options[i];
    arguments[at] = NULL;
    pid_t child = vfork();
    if (!child) {
        execv(STANDIN_PYTHON, (char **)arguments);
        _exit(127);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status == 0;
}

int hiprtcCompileProgram(hiprtcProgram program, int n, const char **options) {
    char folder[] = "/tmp/standin-hip-XXXXXX", path[64];
    if (!mkdtemp(folder)) return COMPILATION;
    snprintf(path, sizeof path, "%s/kernel.hip", folder);
    FILE *file = fopen(path, "w");
    fputs(program->source, file);
    fclose(file);
    int is_compiled = compiled(folder, n, options);
    size_t log_nbytes;
    free(program->log);
    program->log = contents(folder, "log", &log_nbytes);
    program->code = contents(folder, "kernel.so", &program->code_nbytes);
    const char *names[] = {"kernel.hip", "kernel.cpp", "kernel.so", "log"};
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
    return is_compiled ? SUCCESS : COMPILATION;
}

/* CuPy takes off the last byte, which is 0 in the code of NVIDIA's compiler. */
int hiprtcGetCodeSize(hiprtcProgram program, size_t *nbytes) {
    *nbytes = program->code_nbytes + 1;
    return SUCCESS;
}
int hiprtcGetCode(hiprtcProgram program, char *code) {
    memcpy(code, program->code, program->code_nbytes);
    code[program->code_nbytes] = 0;
    return SUCCESS;
}
int hiprtcGetProgramLogSize(hiprtcProgram program, size_t *nbytes) {
    *nbytes = strlen(program->log) + 1;
    return SUCCESS;
}
int hiprtcGetProgramLog(hiprtcProgram program, char *log) {
    strcpy(log, program->log);
    return SUCCESS;
}

/* Templates are not supported. */
int hiprtcAddNameExpression(hiprtcProgram program, const char *name) {
    (void)program, (void)name;
    return INVALID_INPUT;
}
int hiprtcGetLoweredName(hiprtcProgram program, const char *name, const char **lowered) {
    (void)program, (void)name, (void)lowered;
    return INVALID_INPUT;
}
