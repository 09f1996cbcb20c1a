// Run tasks in Java, with nothing but the JDK (17 or later): java Worker.java.
// It knows "shop.resize", and takes it from the queue "images".

import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;

public class Worker {
    static final String SERVER = System.getenv().getOrDefault("SERVER", "http://127.0.0.1:8333");
    /** Seconds: another worker gets what we hold, if we are silent so long. */
    static final double TTR = Double.parseDouble(System.getenv().getOrDefault("TTR", "30"));
    static final HttpClient HTTP = HttpClient.newHttpClient();
    static final ScheduledExecutorService BEATS = Executors.newScheduledThreadPool(1);

    interface Task {
        Object run(List<?> args, Map<?, ?> kwargs, Job job) throws Exception;
    }

    static final Map<String, Task> TASKS = Map.of("shop.resize", Worker::resize);

    static Object resize(List<?> args, Map<?, ?> kwargs, Job job) throws Exception {
        job.heartbeat(Map.of("progress", 0, "total", 1, "log", List.of("resizing " + args.get(0) + " in Java")));
        double seconds = ((Number) or(kwargs.get("seconds"), 0)).doubleValue();
        Thread.sleep((long) (seconds * 1000)); // here you would work
        return args.get(0) + " at " + or(kwargs.get("width"), 640);
    }

    /** A job in our hands. */
    record Job(Map<?, ?> told, Thread thread, String[] stop) {
        void say(String what, Map<?, ?> body) throws Exception {
            post("reservations/" + told.get("receipt") + "/" + what, body);
        }

        /** We live. When the job is to stop, its thread is interrupted. */
        void heartbeat(Map<String, ?> news) throws Exception {
            Map<String, Object> body = new LinkedHashMap<>(news);
            body.put("ttr", TTR);
            Map<?, ?> answer = post("reservations/" + told.get("receipt") + "/heartbeat", body);
            if (answer.get("stop") != null) end((String) answer.get("stop"));
        }

        void end(String why) {
            stop[0] = why;
            thread.interrupt();
        }

        void beat() {
            try {
                heartbeat(Map.of());
            } catch (Exception error) {
                end("lost"); // somebody else may have it by now
            }
        }
    }

    static void run(Map<?, ?> told) {
        Job job = new Job(told, Thread.currentThread(), new String[1]);
        long every = (long) (TTR * 333);
        Future<?> beats = BEATS.scheduleAtFixedRate(job::beat, every, every, TimeUnit.MILLISECONDS);
        try {
            try {
                Task task = TASKS.get(told.get("task"));
                Object result = task.run((List<?>) told.get("args"), (Map<?, ?>) told.get("kwargs"), job);
                job.say("complete", Map.of("result", or(result, "")));
            } catch (Exception error) {
                Thread.interrupted();
                String why = job.stop[0];
                if ("cancelled".equals(why)) job.say("stopped", Map.of());
                else if ("timeout".equals(why)) job.say("fail", Map.of("error", "it ran past its timeout"));
                else if (why == null) job.say("fail", Map.of("error", error.toString(), "traceback", trace(error)));
            }
        } catch (Exception error) {
            System.err.println(error.getMessage()); // the server is away: its ttr decides
        } finally {
            beats.cancel(false);
        }
    }

    public static void main(String[] arguments) throws Exception {
        var threads = Executors.newFixedThreadPool(4);
        Map<String, ?> wish = Map.of(
                "tasks", List.copyOf(TASKS.keySet()), "queues", List.of("images"), "count", 4, "timeout", 30);
        while (true) {
            try {
                List<Future<?>> running = new ArrayList<>();
                for (Object told : (List<?>) post("tasks/reserve", wish).get("jobs"))
                    running.add(threads.submit(() -> run((Map<?, ?>) told)));
                for (Future<?> each : running) each.get();
            } catch (IOException error) {
                System.err.println(error.getMessage());
                Thread.sleep(1000);
            }
        }
    }

    static Map<?, ?> post(String path, Map<?, ?> body) throws IOException, InterruptedException {
        HttpRequest request = HttpRequest.newBuilder(URI.create(SERVER + "/v1/" + path))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(json(body)))
                .build();
        HttpResponse<String> reply = HTTP.send(request, HttpResponse.BodyHandlers.ofString());
        Map<?, ?> answer = reply.body().isEmpty() ? Map.of() : (Map<?, ?>) new Json(reply.body()).value();
        if (reply.statusCode() >= 300) throw new IOException(String.valueOf(answer.get("detail")));
        return answer;
    }

    static Object or(Object value, Object otherwise) {
        return value != null ? value : otherwise;
    }

    static String trace(Exception error) {
        var text = new java.io.StringWriter();
        error.printStackTrace(new java.io.PrintWriter(text));
        return text.toString();
    }

    // JSON, which the JDK does not bring along; in an application use a library

    static String json(Object value) {
        if (value instanceof Map<?, ?> map)
            return map.entrySet().stream().map(e -> json(e.getKey()) + ":" + json(e.getValue()))
                    .collect(Collectors.joining(",", "{", "}"));
        if (value instanceof List<?> list)
            return list.stream().map(Worker::json).collect(Collectors.joining(",", "[", "]"));
        if (!(value instanceof String text)) return String.valueOf(value);
        var out = new StringBuilder("\"");
        for (char c : text.toCharArray())
            out.append(c < 32 || c == '"' || c == '\\' ? String.format("\\u%04x", (int) c) : c);
        return out.append('"').toString();
    }

    static class Json {
        final String text;
        int at = 0;

        Json(String text) {
            this.text = text;
        }

        Object value() {
            char c = text.charAt(at);
            if (c == '{') {
                Map<String, Object> map = new LinkedHashMap<>();
                for (at++; text.charAt(at) != '}'; skip(',')) {
                    String key = string();
                    skip(':');
                    map.put(key, value());
                }
                at++;
                return map;
            }
            if (c == '[') {
                List<Object> list = new ArrayList<>();
                for (at++; text.charAt(at) != ']'; skip(',')) list.add(value());
                at++;
                return list;
            }
            if (c == '"') return string();
            int from = at;
            while (at < text.length() && ",]}".indexOf(text.charAt(at)) < 0) at++;
            String word = text.substring(from, at);
            return switch (word) {
                case "null" -> null;
                case "true", "false" -> Boolean.valueOf(word);
                default -> word.matches("-?\\d{1,18}") ? (Object) Long.valueOf(word) : Double.valueOf(word);
            };
        }

        /** The server writes no blanks between the parts. */
        void skip(char c) {
            if (text.charAt(at) == c) at++;
        }

        String string() {
            var out = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                char c = text.charAt(at);
                if (c != '\\') {
                    out.append(c);
                    continue;
                }
                c = text.charAt(++at);
                int plain = "bfnrt".indexOf(c);
                if (c == 'u') {
                    out.append((char) Integer.parseInt(text.substring(at + 1, at + 5), 16));
                    at += 4;
                } else out.append(plain < 0 ? c : "\b\f\n\r\t".charAt(plain));
            }
            at++;
            return out.toString();
        }
    }
}
