// The JavaScript SDK's own client, driven by lines of JSON on stdin.
//
// usage: node client.mjs LINE BINDING URL TOKEN, where BINDING may be ANY: the card decides
// in:    {"id": 1, "call": "send", ...}
// out:   {"id": 1, "event": ...} for everything that is told, {"id": 1, "done": true} or
//        {"id": 1, "error": {...}} in the end

import { createInterface } from "node:readline";

const [line, binding, url, token] = process.argv.slice(2);

function authenticated(input, init = {}) {
  const headers = new Headers(init.headers);
  headers.set("Authorization", `Bearer ${token}`);
  return fetch(input, { ...init, headers });
}

async function connect(sdk) {
  const { ClientFactory, DefaultAgentCardResolver, JsonRpcTransportFactory, RestTransportFactory } =
    sdk;
  const options = { fetchImpl: authenticated };
  const known = { "HTTP+JSON": RestTransportFactory, JSONRPC: JsonRpcTransportFactory };
  const chosen = binding === "ANY" ? Object.values(known) : [known[binding]];
  const transports = chosen.map((Factory) => new Factory(options));
  const cardResolver = new DefaultAgentCardResolver(options);
  return new ClientFactory({ transports, cardResolver }).createFromUrl(url);
}

// Both lines as the same calls; what comes back is the JSON of the line.
const lines = {
  "1.0": async () => {
    const types = await import("a2a-sdk-1.0");
    const client = await connect(await import("a2a-sdk-1.0/client"));
    const message = ({ text, taskId, background, push }) =>
      types.SendMessageRequest.fromJSON({
        message: {
          messageId: crypto.randomUUID(),
          role: "ROLE_USER",
          parts: [{ text }],
          taskId,
        },
        configuration: { returnImmediately: Boolean(background), taskPushNotificationConfig: push },
      });
    async function* told(stream) {
      for await (const event of stream) yield types.StreamResponse.toJSON(event);
    }
    return {
      send: async (asked) => types.Task.toJSON(await client.sendMessage(message(asked))),
      stream: (asked) => told(client.sendMessageStream(message(asked))),
      get: async ({ taskId }) =>
        types.Task.toJSON(await client.getTask(types.GetTaskRequest.fromJSON({ id: taskId }))),
      cancel: async ({ taskId }) =>
        types.Task.toJSON(
          await client.cancelTask(types.CancelTaskRequest.fromJSON({ id: taskId })),
        ),
      resubscribe: ({ taskId }) =>
        told(client.resubscribeTask(types.SubscribeToTaskRequest.fromJSON({ id: taskId }))),
      card: async () => types.AgentCard.toJSON(await client.getAgentCard()),
      set_push: async ({ taskId, config }) => {
        const asked = types.TaskPushNotificationConfig.fromJSON({ taskId, ...config });
        const made = await client.createTaskPushNotificationConfig(asked);
        return types.TaskPushNotificationConfig.toJSON(made);
      },
      get_push: async ({ taskId, configId: id }) => {
        const asked = types.GetTaskPushNotificationConfigRequest.fromJSON({ taskId, id });
        const found = await client.getTaskPushNotificationConfig(asked);
        return types.TaskPushNotificationConfig.toJSON(found);
      },
      list_push: async ({ taskId }) => {
        const asked = types.ListTaskPushNotificationConfigsRequest.fromJSON({ taskId });
        const found = await client.listTaskPushNotificationConfig(asked);
        return types.ListTaskPushNotificationConfigsResponse.toJSON(found).configs ?? [];
      },
      delete_push: async ({ taskId, configId: id }) => {
        const asked = types.DeleteTaskPushNotificationConfigRequest.fromJSON({ taskId, id });
        await client.deleteTaskPushNotificationConfig(asked);
        return {};
      },
    };
  },
  0.3: async () => {
    const client = await connect(await import("a2a-sdk-0.3/client"));
    const message = ({ text, taskId, background, push }) => ({
      message: {
        kind: "message",
        messageId: crypto.randomUUID(),
        role: "user",
        parts: [{ kind: "text", text }],
        taskId,
      },
      configuration: { blocking: !background, pushNotificationConfig: push },
    });
    return {
      send: (asked) => client.sendMessage(message(asked)),
      stream: (asked) => client.sendMessageStream(message(asked)),
      get: ({ taskId }) => client.getTask({ id: taskId }),
      cancel: ({ taskId }) => client.cancelTask({ id: taskId }),
      resubscribe: ({ taskId }) => client.resubscribeTask({ id: taskId }),
      card: () => client.getAgentCard(),
      set_push: ({ taskId, config }) =>
        client.setTaskPushNotificationConfig({ taskId, pushNotificationConfig: config }),
      get_push: ({ taskId, configId: id }) =>
        client.getTaskPushNotificationConfig({ id: taskId, pushNotificationConfigId: id }),
      list_push: ({ taskId }) => client.listTaskPushNotificationConfig({ id: taskId }),
      delete_push: async ({ taskId, configId: id }) => {
        await client.deleteTaskPushNotificationConfig({ id: taskId, pushNotificationConfigId: id });
        return {};
      },
    };
  },
};

function say(value) {
  process.stdout.write(`${JSON.stringify(value)}\n`);
}

async function answer(calls, { id, call, ...asked }) {
  try {
    const result = await calls[call](asked);
    if (result[Symbol.asyncIterator]) {
      for await (const event of result) say({ id, event });
    } else {
      say({ id, event: result });
    }
    say({ id, done: true });
  } catch (error) {
    say({ id, error: { name: error.name, message: error.message } });
  }
}

const calls = await lines[line]();
say({ ready: true });
for await (const command of createInterface({ input: process.stdin })) {
  answer(calls, JSON.parse(command));
}
